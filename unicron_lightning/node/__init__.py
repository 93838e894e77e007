"""The node's daemon, ``unicron agent``: runs the torchrun agents of submitted tasks as the coordinator orders."""
