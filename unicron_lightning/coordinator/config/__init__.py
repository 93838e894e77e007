"""Configuration of the coordinator; every key with unit, default and reason: docs/configuration.md."""
