"""What the strategy tells of the model's size."""

from __future__ import annotations

from typing import Any

import pytest

from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.reporting import told_flops


class Module:
    """As much of a LightningModule as is asked."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def test_a_module_may_tell_the_flops_of_a_step():
    assert told_flops(Module()) is None
    assert told_flops(Module(flops_per_step=6 * 10**15)) == 6e15


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), True, "6e15"])
def test_what_is_no_number_above_0_is_refused(wrong: Any):
    with pytest.raises(ConfigError, match=r"Module\.flops_per_step=.*: expected FLOPs"):
        told_flops(Module(flops_per_step=wrong))
