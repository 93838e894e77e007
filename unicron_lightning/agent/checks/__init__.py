"""Checks of the agent's machine and of its links to other machines."""
