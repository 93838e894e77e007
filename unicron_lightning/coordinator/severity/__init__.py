"""What is done about errors: SEV3 in place, SEV2 one node's workers, SEV1 the node; and when to give up."""
