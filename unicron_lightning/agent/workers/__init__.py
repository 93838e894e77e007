"""The workers of an agent's node: their socket, processes and ends, and the slot that they occupy."""
