"""Agents, their slots and workers, and the epochs in which workers train together."""
