"""Thin HTTP handlers: parse, call, answer. What they call knows neither requests nor status codes."""
