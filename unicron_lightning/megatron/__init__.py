"""Megatron-core under Unicron: state, redundancy and checkpoints of TP x PP x DP training.

Needs the extra ``unicron-lightning[megatron]``. Nothing here is imported unless it is used.
"""
