"""The strategy ``unicron_megatron``."""
