"""The nodes of each task."""
