"""The agent's connection to the coordinator."""
