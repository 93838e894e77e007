"""The worker's side: control thread, communicator, reducer, ledger and recovery."""
