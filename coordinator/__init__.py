"""What runs on the server: rounds, cohorts, streaming sparse averages. numpy only; imports no torch."""
