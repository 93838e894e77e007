"""Models sharded with FSDP2 within a replica, and trained through failures between replicas."""
