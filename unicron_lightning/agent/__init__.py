"""The agent: torchrun's rendezvous handler, which communicates with the coordinator on behalf of its node's workers."""
