"""Reactions to errors: SEV3 in place, SEV2 one node's workers, SEV1 the node; and when a task is stopped."""
