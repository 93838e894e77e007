"""The worker's side: control thread, communicator, reducer, division of work and recovery."""
