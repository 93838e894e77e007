"""Online statistics of a task: who hangs, whether it has become slow, and who holds the others up."""
