"""What all command lines share: exit codes, options, and how a command ends. Uses the standard library alone."""
