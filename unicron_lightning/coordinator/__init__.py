"""The coordinator: one process per cluster that decides who is in which world."""
