"""Local training that leaves frozen parameters alone, evaluation, and the rule that stops a device."""
