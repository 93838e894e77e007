"""The step protocol for a training loop in plain PyTorch: `run.Run` (docs/loop.md)."""
