"""A list of faults, written in Python: ``Faults().kill(rank=1, step=25).hang(node="b", rate=2)``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypedDict, overload

from typing_extensions import Unpack, override

from unicron_lightning.faults.fault import Fault, Kind, Phase
from unicron_lightning.faults.language import parse, read_faults, text


class FaultPlace(TypedDict, total=False):
    """Place and time, as in `Fault`."""

    task: str
    node: str
    rank: int | Literal["all"]
    joiner: bool
    step: int
    from_step: int
    micro_batch: int
    bucket: int
    phase: Phase
    point: str
    world: int
    after: float
    rate: float
    times: int
    seed: int


class Faults(Sequence[Fault]):
    """Faults in order. Each method returns a new list with one more; keyword arguments are those of `Fault`."""

    def __init__(self, faults: Iterable[Fault | str] = ()) -> None:
        faults = [faults] if isinstance(faults, str) else faults
        self._faults = tuple(parse(fault) if isinstance(fault, str) else fault for fault in faults)

    @classmethod
    def read(cls, path: Path | str) -> Faults:
        """Read the faults of a file, see `language.read_faults`."""
        return cls(read_faults(Path(path)))

    @property
    def texts(self) -> list[str]:
        """Each fault as text."""
        return [text(fault) for fault in self._faults]

    def kill(self, signal: str | None = None, **place: Unpack[FaultPlace]) -> Faults:
        """Send a signal to a worker, SIGKILL by default."""
        return self._with("kill", place, signal)

    def kill_agent(self, signal: str | None = None, **place: Unpack[FaultPlace]) -> Faults:
        """Send a signal to an agent, whose workers die with it."""
        return self._with("kill agent", place, signal)

    def kill_coordinator(self, signal: str | None = None, **place: Unpack[FaultPlace]) -> Faults:
        """Send a signal to the coordinator."""
        return self._with("kill coordinator", place, signal)

    def stop(self, seconds: float | None = None, **place: Unpack[FaultPlace]) -> Faults:
        """Send SIGSTOP to a worker, and SIGCONT after a number of seconds."""
        return self._with("stop", place, duration=seconds)

    def hang(self, how: str | None = None, seconds: float | None = None, **place: Unpack[FaultPlace]) -> Faults:
        """Block a worker's main thread: it sleeps, spins, or holds the interpreter's lock (``gil``)."""
        return self._with("hang", place, how, seconds)

    def raise_error(self, error: str, **place: Unpack[FaultPlace]) -> Faults:
        """Raise an error of a kind of `examples.EXAMPLES` in a worker."""
        return self._with("raise", place, error)

    def exit(self, status: int, **place: Unpack[FaultPlace]) -> Faults:
        """End a worker's process immediately."""
        return self._with("exit", place, status)

    def slow(
        self, factor: float, seconds: float | None = None, *, steps: int | None = None, **place: Unpack[FaultPlace]
    ) -> Faults:
        """Multiply the duration of a worker's micro-batches by a factor."""
        return self._with("slow", place, float(factor), seconds, steps)

    def drop_network(self, seconds: float | None = None, **place: Unpack[FaultPlace]) -> Faults:
        """Make an agent's connection to the coordinator carry nothing, without either end being notified."""
        return self._with("drop network", place, duration=seconds)

    def corrupt_gradient(self, **place: Unpack[FaultPlace]) -> Faults:
        """Make a worker's gradient NaN in one backward."""
        return self._with("corrupt gradient", place)

    def _with(
        self,
        kind: Kind,
        place: FaultPlace,
        argument: str | float | None = None,
        duration: float | None = None,
        steps: int | None = None,
    ) -> Faults:
        fault = Fault(kind=kind, argument=argument, duration=duration, steps=steps, **place)
        return Faults((*self._faults, fault))

    def seeded(self, seed: int) -> Faults:
        """Return the list with a seed for faults without one."""
        return Faults(fault if fault.seed is not None else replace(fault, seed=seed) for fault in self._faults)

    @overload
    def __getitem__(self, index: int) -> Fault: ...
    @overload
    def __getitem__(self, index: slice) -> Faults: ...
    @override
    def __getitem__(self, index: int | slice) -> Fault | Faults:
        return Faults(self._faults[index]) if isinstance(index, slice) else self._faults[index]

    @override
    def __len__(self) -> int:
        return len(self._faults)

    @override
    def __iter__(self) -> Iterator[Fault]:
        return iter(self._faults)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Faults) and self._faults == other._faults

    def __hash__(self) -> int:
        return hash(self._faults)

    def __repr__(self) -> str:
        return f"Faults({self.texts!r})"
