"""Who may connect to the coordinator, and how: its port, encryption, mutual proof and limits."""
