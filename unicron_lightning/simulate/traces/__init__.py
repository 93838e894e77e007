"""Sources of traces: generators with stated parameters, and files of a user's own events. Pure."""
