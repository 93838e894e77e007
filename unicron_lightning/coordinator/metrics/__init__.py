"""Figures of the coordinator for Prometheus: what is counted, time by kind, and their exposition."""
