"""The control thread of a worker, and what it observes of the training thread."""
