"""Online statistics of a task: detection of hangs, of slow steps, and of stragglers."""
