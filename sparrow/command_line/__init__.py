"""Parts that all command lines share: exit codes, options, the end of a command. Uses the standard library alone."""
