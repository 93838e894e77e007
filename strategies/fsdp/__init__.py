"""The strategy ``unicron_fsdp``."""
