"""Types of an optimizer's state, which torch's own loading changes."""

from __future__ import annotations

import copy
from typing import Any

import torch

from unicron_lightning.worker.model_state import keep_types


def test_nested_states_keep_their_types() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter])
    third = torch.full((2,), 1 / 3)
    optimizer.state[parameter] = {"pair": (third, 3), "nested": [{"pair": (third, None)}], "scalar": third[0]}
    state: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    keep_types(optimizer, state)
    found = optimizer.state[parameter]
    assert found["pair"][1] == 3 and type(found["pair"]) is type(found["nested"][0]["pair"]) is tuple
    for value in (found["pair"][0], found["nested"][0]["pair"][0], found["scalar"].expand(2)):
        assert value.dtype == torch.float32 and torch.equal(value, third)
