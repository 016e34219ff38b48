"""Shared parts of command lines: exit codes, options, errors. Imports only the standard library."""
