"""Process groups are found and replaced wherever Megatron's objects hold them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unicron_lightning.megatron.references import replace_groups, stale_groups


def group() -> dist.ProcessGroup:
    return dist.ProcessGroup(dist.HashStore(), 0, 1)


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def method(self) -> Any:
        return self.held


def test_attributes_containers_modules_closures_and_bound_methods() -> None:
    old, new, other = group(), group(), group()
    module = torch.nn.Linear(1, 1)
    module.tp_group = old
    module.weight.mark = old
    listed, named, bound, kept = [old, other], {"pp": old}, Holder(old), old

    def closure() -> Any:
        return kept

    roots = [torch.nn.Sequential(module), listed, {"deep": [named]}, bound.method, closure, Holder(listed)]
    assert stale_groups(roots, [new, other]) == 6
    assert replace_groups(roots, {id(old): new}) == 6
    assert stale_groups(roots, [new, other]) == 0
    assert module.tp_group is new and module.weight.mark is new
    assert listed == [new, other] and named == {"pp": new} and bound.held is new and closure() is new


def test_what_cannot_be_replaced_is_an_error() -> None:
    old, new = group(), group()
    for place in ((old,), functools.partial(print, old)):
        with pytest.raises(TypeError, match="cannot be replaced"):
            replace_groups([Holder(place)], {id(old): new})


def test_objects_that_refer_to_each_other_are_walked_through_once() -> None:
    old, new = group(), group()
    first, second = Holder(old), Holder(old)
    first.other, second.other = second, first  # type: ignore[attr-defined]
    assert replace_groups([first], {id(old): new}) == 2
