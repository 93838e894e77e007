"""Data: samplers that number micro-batches whatever the world, and the demonstration's text."""
