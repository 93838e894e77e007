"""Places, the accelerators that tasks share, and which task has which of them, as planned."""
