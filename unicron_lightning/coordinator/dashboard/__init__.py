"""The page that the coordinator serves: its sessions, the state that it shows, and its files."""
