"""A list of faults, written in Python: ``Faults(["kill rank=1 step=25", "hang node=b rate=2/h"])``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from typing_extensions import Self, override

from unicron_lightning.faults.fault import Fault
from unicron_lightning.faults.language import parse, read_faults, text


class Faults(tuple[Fault, ...]):
    """Faults in order.

    Args:
        faults: `Fault` s, or texts of the language; also a single text.

    Raises:
        ConfigError: a text is no fault.
    """

    __slots__ = ()

    def __new__(cls, faults: Iterable[Fault | str] = ()) -> Self:
        faults = [faults] if isinstance(faults, str) else faults
        return super().__new__(cls, (parse(fault) if isinstance(fault, str) else fault for fault in faults))

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read the faults of a file, see `language.read_faults`."""
        return cls(read_faults(Path(path)))

    @property
    def texts(self) -> list[str]:
        """Each fault as text."""
        return [text(fault) for fault in self]

    def seeded(self, seed: int) -> Self:
        """Return the list with a seed for faults without one."""
        return type(self)(fault if fault.seed is not None else replace(fault, seed=seed) for fault in self)

    @override
    def __repr__(self) -> str:
        return f"Faults({self.texts!r})"
