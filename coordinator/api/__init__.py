"""Thin HTTP handlers: parse, call, answer. The domain behind them knows neither requests nor status codes."""
