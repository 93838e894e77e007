"""Accounts of a simulation: progress of tasks, use of workers' time, costs of failures, and the ideal without any."""
