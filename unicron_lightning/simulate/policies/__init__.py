"""Compared systems: each defines how errors are detected, what stops, what is lost, and which task gets which nodes."""
