"""The coordinator, which runs on the server: rounds, cohorts, streaming sparse averages. It uses numpy, not torch."""
