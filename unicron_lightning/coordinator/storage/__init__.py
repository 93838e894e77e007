"""State that outlives the process: what a batch of decisions writes, the SQLite database, the event log."""
