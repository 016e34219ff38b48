"""Global models, the payloads cut from them, and their evaluation."""
