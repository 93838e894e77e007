"""Logged values, metrics and loggers."""
