"""The search for parameters that need gradients."""

from __future__ import annotations

import torch
from torch import nn

from unicron_lightning.worker.buckets import TrainedParameters


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def names(trained: TrainedParameters, module: nn.Module, *optimizers: torch.optim.Optimizer, anew: bool) -> list[str]:
    return [name for name, _ in trained.find(module, optimizers, anew=anew)]


def test_frozen_ones_come_and_go_at_once() -> None:
    module, trained = net(), TrainedParameters()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert names(trained, module, optimizer, anew=True) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    module[0].requires_grad_(False)
    assert names(trained, module, optimizer, anew=False) == ["1.weight", "1.bias"]
    module[0].requires_grad_(True)
    assert len(names(trained, module, optimizer, anew=False)) == 4


def test_a_new_layer_is_seen_when_the_optimizer_gets_it_or_an_epoch_begins() -> None:
    module, trained = net(), TrainedParameters()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trained.find(module, [optimizer], anew=True)
    module.append(nn.Linear(1, 1, bias=False))
    assert "2.weight" not in names(trained, module, optimizer, anew=False)
    assert "2.weight" in names(trained, module, optimizer, anew=True)
    module.append(nn.Linear(1, 1, bias=False))
    optimizer.add_param_group({"params": list(module[3].parameters())})
    assert "3.weight" in names(trained, module, optimizer, anew=False)
    old = module[3]
    module[3] = nn.Linear(1, 1, bias=False)
    optimizer.param_groups[-1]["params"] = list(module[3].parameters())
    found = dict(trained.find(module, [optimizer], anew=False))
    assert found["3.weight"] is module[3].weight and found["3.weight"] is not old.weight
