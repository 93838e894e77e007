"""The shell around the machine: HTTP, connections, proof and encryption, timers."""
