"""The coordinator's HTTP API: routes, their answers and their explanations."""
