"""Parameters as they were at each optimizer step within one ``training_step`` of manual optimization.

A strand that is behind the others, because its rank has several micro-batches or replaces a dead one, continues with
the parameters that its micro-batch has seen in the first place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter


class ParameterVersions:
    """Copies of parameters, made before each optimizer step; version v precedes the v-th one.

    Memory: one copy of an optimizer's parameters for each of its steps within one ``training_step``.

    Attributes:
        newest: number of optimizer steps so far.
    """

    def __init__(self) -> None:
        self._live: dict[Parameter, Tensor] = {}
        self._before: list[dict[Parameter, Tensor]] = []
        self._shown = 0
        self._spare: dict[Parameter, list[Tensor]] = {}

    @property
    def newest(self) -> int:
        return len(self._before)

    def begin(self) -> None:
        """Start a step of Lightning's loop."""
        for copies in self._before:
            for parameter, copy in copies.items():
                self._spare.setdefault(parameter, []).append(copy)
        self._before, self._live, self._shown = [], {}, 0

    def keep(self, parameters: Iterable[Parameter]) -> None:
        """Copy the parameters that an optimizer is about to change; the newest version must be in place."""
        assert self._shown == self.newest, "an older version is in place"
        live = {parameter: parameter.data for parameter in parameters}
        copies = {parameter: self._copy(parameter) for parameter in live}
        if copies:
            torch._foreach_copy_(list(copies.values()), list(live.values()))
        self._live |= live
        self._before.append(copies)
        self._shown = self.newest

    def show(self, version: int) -> None:
        """Put a version in place; the parameters then refer to other memory."""
        if version == self._shown:
            return
        self._shown = version
        for parameter, live in self._live.items():
            later = (copies[parameter] for copies in self._before[version:] if parameter in copies)
            parameter.data = next(later, live)

    def _copy(self, parameter: Parameter) -> Tensor:
        spare = self._spare.get(parameter)
        while spare:
            copy = spare.pop()
            if copy.shape == parameter.shape and copy.dtype == parameter.dtype and copy.device == parameter.device:
                return copy
        return torch.empty_like(parameter.data)
