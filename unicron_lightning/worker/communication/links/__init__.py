"""Collectives on host memory over authenticated connections that survive an epoch."""
