"""Data: samplers that number micro-batches independently of the world, and data loaders."""
