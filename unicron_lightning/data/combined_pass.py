"""Several loaders that an evaluation reads at once, in place of Lightning's `CombinedLoader`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from typing_extensions import Self, override

from unicron_lightning.data.combined_loader import Combined
from unicron_lightning.data.loader import Items
from unicron_lightning.data.order import StepShape
from unicron_lightning.data.pass_loaders import EvaluationLoader


class CombinedPass(Combined):
    """Yields this rank's combined batches of an evaluation pass.

    Args:
        users: the loaders and their mode, which is not ``sequential``.
        devices: of the declared world.
        whole: makes the loader of combined batches, once Lightning has taken all loaders.
    """

    def __init__(self, users: CombinedLoader, devices: int, whole: Callable[[CombinedPass], EvaluationLoader]) -> None:
        super().__init__(users, StepShape(devices=devices, accumulation=1))
        self._make = whole
        self._whole: EvaluationLoader | None = None

    @property
    def whole(self) -> EvaluationLoader:
        """The loader of combined batches."""
        if self._whole is None:
            self._whole = self._make(self)
        return self._whole

    @override
    def __iter__(self) -> Self:
        self._iterator = Items(enumerate(self.whole))  # type: ignore[assignment]
        return self

    @override
    def __next__(self) -> tuple[object, int, int]:
        assert self._iterator is not None
        item: Any = next(self._iterator)
        number, batch = item
        return batch, number, 0

    @override
    def __len__(self) -> int:
        return len(self.whole) if math.isinf(self.most) else int(self.most)

    @override
    def reset(self) -> None:
        self._iterator = None
        if self._whole is not None:
            self._whole.end()


def passes_of(combined: CombinedLoader, limits: list[int | float]) -> list[tuple[EvaluationLoader, float]]:
    """Return the loaders of an evaluation, each with its largest number of batches for each device.

    Args:
        combined: of Lightning's loop.
        limits: of each loader that the user gave.
    """
    if isinstance(combined, CombinedPass):
        return [(combined.whole, combined.most)]
    return list(zip(combined.flattened, limits, strict=True))
