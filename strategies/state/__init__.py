"""The training state: checkpoints, joins, buffers, and comparisons between workers."""
