"""Finds the process groups that live objects of Megatron hold, and replaces them.

Megatron cannot give a model other groups: they are attributes of some twenty classes, of a shared collection, and of
bound methods in the configuration. Therefore everything reachable from the model, its optimizer and their configuration
is searched.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_LEAVES = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.BuiltinFunctionType)
_TORCH_VALUES = (torch.dtype, torch.device, torch.Size, torch.Generator)

Replace = Callable[[Any], None]


def replace_groups(roots: Iterable[object], mapping: Mapping[int, dist.ProcessGroup]) -> int:
    """Replace old groups by new ones.

    Args:
        roots: objects to start from.
        mapping: from the `id` of an old group, which must be alive, to the new one.

    Returns:
        The number of replaced references.
    """
    found = [(group, replace) for group, replace in walk(roots) if id(group) in mapping]
    for group, replace in found:
        replace(mapping[id(group)])
    return len(found)


def stale_groups(roots: Iterable[object], valid: Iterable[dist.ProcessGroup]) -> int:
    """Number of reachable references to groups other than the ``valid`` ones."""
    known = {id(group) for group in valid}
    return sum(1 for group, _ in walk(roots) if id(group) not in known)


def walk(roots: Iterable[object]) -> Iterator[tuple[dist.ProcessGroup, Replace]]:
    """Each reachable reference to a process group, with a function that replaces it."""
    alive: dict[int, object] = {}  # keeps temporary objects alive, so that identities stay unique
    queue = deque(roots)
    while queue:
        item = queue.pop()
        if isinstance(item, (*_LEAVES, *_TORCH_VALUES)) or id(item) in alive:
            continue
        alive[id(item)] = item
        for value, replace in _references(item):
            if isinstance(value, dist.ProcessGroup):
                yield value, replace
            else:
                queue.append(value)


def _references(item: Any) -> Iterator[tuple[Any, Replace]]:
    """Objects to which an object refers directly."""
    if isinstance(item, types.FunctionType):
        for cell in item.__closure__ or ():
            try:
                yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
            except ValueError:  # an empty cell
                continue
        return
    if isinstance(item, types.MethodType):
        yield item.__self__, _fixed
        return
    if isinstance(item, functools.partial):
        for value in (item.func, *item.args, *item.keywords.values()):
            yield value, _fixed
    if isinstance(item, dict):
        for key in list(item):
            yield item[key], functools.partial(item.__setitem__, key)
    elif isinstance(item, list):
        for place in range(len(item)):
            yield item[place], functools.partial(item.__setitem__, place)
    elif isinstance(item, tuple | set | frozenset | deque):
        for value in list(item):
            yield value, _fixed
    attributes = getattr(item, "__dict__", None)
    if isinstance(attributes, dict):
        for name in list(attributes):
            yield attributes[name], functools.partial(_set, item, name)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, nn.Module):  # its own __setattr__ does more
        owner.__dict__[name] = value
    else:
        object.__setattr__(owner, name, value)


def _fixed(_: Any) -> None:
    raise TypeError("a process group is held where it cannot be replaced: in a tuple, a set or a partial")
