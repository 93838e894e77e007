"""The batch that hooks see: this rank's micro-batches of a step."""

from __future__ import annotations

import torch

from unicron_lightning.data.loader import joined


def test_a_loader_that_has_ended_gives_none() -> None:
    """As one of several loaders under ``max_size``, in a step's later micro-batches."""
    one, other = torch.ones(2, 1), torch.zeros(1, 1)
    whole = joined([{"a": one, "b": other}, {"a": other, "b": None}])
    assert whole["a"].shape == (3, 1) and whole["b"] == [other, None]
