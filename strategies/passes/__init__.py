"""Validation, test and prediction passes, and the loaders of all loops."""
