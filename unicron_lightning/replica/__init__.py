"""Replicas of S workers that hold a model together: the unit of failure of spread models."""
