"""Checkpoints in folders of `torch.distributed.checkpoint`: their index, and their writing beside the training."""
