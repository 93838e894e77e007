"""The agent: torchrun's rendezvous handler, which speaks with the coordinator for its node's workers."""
