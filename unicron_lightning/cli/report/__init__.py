"""``unicron report``: one file about a task: its world, steps, loss, incidents, goodput, and what was saved."""
