"""Faults as values: kind, place and time; and as text: ``KIND [ARGUMENT] [key=value ...]``.

    kill rank=1 step=25 micro_batch=1
    kill SIGTERM node=b
    slow x3 rank=2 from_step=10 steps=20
    hang spin node=b rate=2/h seed=7

`parse` and `text` are inverse to each other; `text` writes values that differ from the defaults, in the order of
`docs/faults.md`. A file is a YAML list of such texts.

Nothing here carries out a fault. Faults that raise have a typical error message of a library for each kind of error:
the texts have the form in which torch, CUDA, NCCL and gloo report such errors, with invented addresses and numbers, so
that classification by text sees realistic messages.
"""

from __future__ import annotations

import math
import re
import shlex
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
from typing_extensions import Self, override

from unicron_lightning.errors import ConfigError

_ASYNCHRONOUS: Final = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
_NCCL: Final = "NCCL error in: ProcessGroupNCCL.cpp:3690, {}, NCCL version 2.27.5\n"


@dataclass(frozen=True, kw_only=True)
class Example:
    """An exception as a library raises it.

    Attributes:
        exception: its class: a built-in one, or one of torch by its path.
        text: its message.
        collective: whether it is raised by a collective, as a failed connection is, and not by a computation.
    """

    exception: str
    text: str
    collective: bool = False


def _cuda(what: str) -> Example:
    return Example(exception="torch.AcceleratorError", text=f"CUDA error: {what}{_ASYNCHRONOUS}")


EXAMPLES: Final[dict[str, Example]] = {
    "connection_failed": Example(
        exception="RuntimeError",
        text="[gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.3.17]:42113",
        collective=True,
    ),
    "illegal_memory_access": _cuda("an illegal memory access was encountered"),
    "ecc_error": _cuda("uncorrectable ECC error encountered"),
    "invalid_dma_mapping": Example(
        exception="RuntimeError", text="NVRM: GPU 0000:3b:00.0: Failed to create a DMA mapping!"
    ),
    "nvlink_error": _cuda("uncorrectable NVLink error detected during the execution"),
    "gpu_driver_error": Example(
        exception="RuntimeError", text="CUDA driver initialization failed, you might not have a CUDA gpu."
    ),
    "cuda_error": _cuda("device-side assert triggered"),
    "other_network_error": Example(
        exception="torch.distributed.DistBackendError",
        text=_NCCL.format("unhandled system error (run with NCCL_DEBUG=INFO for details)")
        + "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
        "Last error:\nCall to ibv_modify_qp failed with 113 No route to host, on dev mlx5_2:1",
        collective=True,
    ),
    "other_software_error": Example(
        exception="RuntimeError", text="mat1 and mat2 shapes cannot be multiplied (32x784 and 512x10)"
    ),
    "nccl_timeout": Example(
        exception="torch.distributed.DistBackendError",
        text="[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1873, OpType=ALLREDUCE, "
        "NumelIn=262144, NumelOut=262144, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.",
        collective=True,
    ),
    "out_of_memory": Example(
        exception="torch.OutOfMemoryError",
        text="CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which "
        "1.02 GiB is free. Including non-PyTorch memory, this process has 78.07 GiB memory in use.",
    ),
}
"""Examples by kind of error."""


Kind = Literal[
    "kill",
    "kill agent",
    "kill coordinator",
    "stop",
    "hang",
    "raise",
    "exit",
    "slow",
    "drop network",
    "corrupt gradient",
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
_FaultPhase = Literal[
    "exchange",
    "connect",
    "join",
    "agree",
    "forward",
    "micro_batch",
    "launched",
    "reduced",
    "commit",
    "committed",
    "validation",
    "evaluated",
    "checkpoint",
]
PHASES: Final[tuple[_FaultPhase, ...]] = get_args(_FaultPhase)
"""Points of a worker's program at which a fault can strike; docs/faults.md describes each."""
HANGS: Final = ("sleep", "spin", "gil")
LASTING: Final = ("stop", "hang", "slow", "drop network")
"""Kinds that have a duration."""
OF_AGENT: Final = ("kill", "kill agent", "stop", "drop network")
"""Kinds that an agent can carry out without its worker's help."""
IN_BACKWARD: Final = ("slow", "corrupt gradient")
"""Kinds that begin with a micro-batch's forward, and so have no other phase."""
SECONDS_PER_HOUR: Final = 3600.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        kind: the kind of fault.
        argument: of a kill the signal's name, of a hang one of `HANGS`, of a raise the kind of error, of an exit the
            status, of a slow-down the factor; None for the kind's default, or if it has no argument.
        duration: seconds that it lasts (`LASTING`); None: until it is ended from outside.
        steps: of a slow-down: optimizer steps that it lasts; None: no limit.
        task: only in this task.
        node: only on this node.
        rank: only this global rank (negative: from the end, -1 is the last); ``all``: each worker that fits; None: one
            of those that fit, drawn by the seed.
        joiner: only a worker that has no state yet.
        step: only while this optimizer step is computed, counted from 0 as ``trainer.global_step``.
        from_step: not before this step.
        micro_batch: with this one of the micro-batches that the worker computes in a step, from 0.
        bucket: when the reduction of this bucket of gradients has been launched, from 0.
        phase: at this point; None: wherever the rest fits first.
        point: when the script passes this point of its own; with ``micro_batch``: while it computes that one.
        world: only while this number of workers train together.
        after: seconds from the start of the injection; not before.
        rate: expected strikes per hour, as a Poisson process; None: as soon as the rest fits.
        times: maximum number of strikes; None: once, or with a rate without limit.
        seed: seed of random draws; None: that of the injection.

    Raises:
        ConfigError: values that do not go together, quoted.
    """

    kind: Kind
    argument: str | float | None = None
    duration: float | None = None
    steps: int | None = None
    task: str | None = None
    node: str | None = None
    rank: int | Literal["all"] | None = None
    joiner: bool = False
    step: int | None = None
    from_step: int | None = None
    micro_batch: int | None = None
    bucket: int | None = None
    phase: _FaultPhase | None = None
    point: str | None = None
    world: int | None = None
    after: float | None = None
    rate: float | None = None
    times: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"{self.kind!r}: expected a kind of fault, one of {', '.join(KINDS)}")
        self._check_argument()
        self._check_numbers()
        self._check_together()

    @property
    def most(self) -> int | None:
        """Maximum number of strikes; None: no limit."""
        return 1 if self.times is None and self.rate is None else self.times

    @property
    def signal(self) -> signal.Signals:
        """Signal that a kill sends."""
        assert self.kind.startswith("kill") and not isinstance(self.argument, float)
        return signal.Signals[self.argument or "SIGKILL"]

    @property
    def waits(self) -> bool:
        """Whether it strikes at a certain point of a worker's program, and not immediately."""
        points = (self.step, self.from_step, self.micro_batch, self.bucket, self.phase, self.point, self.world)
        return self.joiner or any(point is not None for point in points)

    def victims(self, nodes: Sequence[str], draw: float) -> list[int]:
        """Return the global ranks that it strikes.

        Args:
            nodes: the node of each member of the world, in rank order.
            draw: a random number, at least 0 and below 1, that selects among several possible ranks.
        """
        fitting = [rank for rank, node in enumerate(nodes) if self.node in (None, node)]
        if self.rank == "all":
            return fitting
        if self.rank is not None:
            wanted = self.rank if self.rank >= 0 else len(nodes) + self.rank
            return [rank for rank in fitting if rank == wanted]
        return [fitting[int(draw * len(fitting))]] if fitting else []

    def _check_argument(self) -> None:
        given, name = self.argument, f"{self.kind} {self.argument}"
        if given is None:
            if self.kind in ("raise", "exit", "slow"):
                wanted = {"raise": "a kind of error", "exit": "an exit status", "slow": "a factor such as x3"}[
                    self.kind
                ]
                raise ConfigError(f"{self.kind}: expected {wanted} behind it")
        elif self.kind in ("kill", "kill agent", "kill coordinator"):
            if given not in signal.Signals.__members__:
                raise ConfigError(f"{name}: expected a signal, e.g. SIGTERM, or nothing for SIGKILL")
        elif self.kind == "hang":
            if given not in HANGS:
                raise ConfigError(f"{name}: expected one of {', '.join(HANGS)}")
        elif self.kind == "raise":
            if given not in EXAMPLES:
                raise ConfigError(f"{name}: expected a kind of error, one of {', '.join(EXAMPLES)}")
        elif self.kind == "exit":
            if not (isinstance(given, int) and 0 <= given <= 255):
                raise ConfigError(f"{name}: expected an exit status, 0 to 255")
        elif self.kind == "slow":
            if not (isinstance(given, (int, float)) and math.isfinite(given) and given > 1):
                raise ConfigError(f"{name}: expected a factor above 1")
        else:
            raise ConfigError(f"{name}: expected nothing but key=value behind {self.kind}")

    def _check_numbers(self) -> None:
        for name, seconds in (("for", self.duration), ("after", self.after), ("rate", self.rate)):
            if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
                raise ConfigError(f"{name}={seconds}: expected a number > 0")
        for name, count in (("steps", self.steps), ("times", self.times), ("world", self.world)):
            if count is not None and count < 1:
                raise ConfigError(f"{name}={count}: expected a whole number >= 1")
        places = ("step", "from_step", "micro_batch", "bucket")
        for name in places:
            place = getattr(self, name)
            if place is not None and place < 0:
                raise ConfigError(f"{name}={place}: expected a whole number >= 0")
        if self.phase is not None and self.phase not in PHASES:
            raise ConfigError(f"phase={self.phase}: expected one of {', '.join(PHASES)}")
        if isinstance(self.rank, str) and self.rank != "all":
            raise ConfigError(f"rank={self.rank}: expected a whole number (-1: the last rank), or all")

    def _check_together(self) -> None:
        if self.duration is not None and self.kind not in LASTING:
            raise ConfigError(f"for= with {self.kind}: expected it with {', '.join(LASTING)} only")
        if self.steps is not None and self.kind != "slow":
            raise ConfigError(f"steps= with {self.kind}: expected it with slow only")
        if self.step is not None and self.from_step is not None:
            raise ConfigError(f"step={self.step} from_step={self.from_step}: expected one of them")
        if self.kind == "kill coordinator" and (self.node is not None or self.rank == "all"):
            raise ConfigError("kill coordinator: expected no node= or rank=all, as there is one coordinator")
        if self.micro_batch is not None and self.phase not in (None, "forward", "micro_batch"):
            raise ConfigError(f"micro_batch= with phase={self.phase}: expected phase=forward or micro_batch")
        if self.bucket is not None and (self.phase not in (None, "launched") or self.micro_batch is not None):
            raise ConfigError(f"bucket={self.bucket}: expected it alone, or with phase=launched")
        if self.point is not None and (self.phase is not None or self.bucket is not None):
            raise ConfigError(f"point={self.point}: expected it without phase= and bucket=")
        if self.kind in IN_BACKWARD and self.point is not None:
            raise ConfigError(f"{self.kind} with point={self.point}: it begins with a forward; expected no point=")
        if self.kind in IN_BACKWARD and (self.phase not in (None, "forward") or self.bucket is not None):
            raise ConfigError(f"{self.kind} with phase={self.phase}: it begins with a forward; expected no other phase")


_UNITS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER: Final = r"(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)"
_DURATION: Final = re.compile(_NUMBER + r"(ms|s|m|h|d)?")
_RATE: Final = re.compile(_NUMBER + r"/(s|m|h|d)")
_FACTOR: Final = re.compile("x?" + _NUMBER)
_WHOLE: Final = re.compile(r"-?\d+")


def parse(words: str) -> Fault:
    """Parse a fault.

    Raises:
        ConfigError: quotes the text and states the expected form.
    """
    try:
        return _parse(words)
    except ValueError as error:  # of shlex: unbalanced quotes; ConfigError is one, too
        raise ConfigError(f"fault {words!r}: {error}") from None


def text(fault: Fault) -> str:
    """Return a fault as text."""
    parts: list[str] = [fault.kind]
    if fault.argument is not None:
        parts.append(f"x{_number(float(fault.argument))}" if fault.kind == "slow" else str(fault.argument))
    for key, write in _WRITERS.items():
        value = getattr(fault, _FIELD.get(key, key))
        if value is not None and value is not False:
            parts.append(f"{key}={shlex.quote(write(value))}")
    return " ".join(parts)


def _read_faults(path: Path) -> list[Fault]:
    """Read the faults of a file: a YAML list of texts.

    Raises:
        ConfigError: it can't be read, or has other contents.
    """
    try:
        lines = msgspec.yaml.decode(path.read_bytes(), type=list[str])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: expected a YAML list of faults as text: {error}") from error
    return [parse(line) for line in lines]


def _parse(words: str) -> Fault:
    parts = shlex.split(words)
    known = [kind for kind in KINDS if parts[: kind.count(" ") + 1] == kind.split()]
    if not known:
        raise ConfigError(f"expected it to begin with one of {', '.join(KINDS)}")
    kind = max(known, key=len)
    del parts[: kind.count(" ") + 1]
    arguments = [part for part in parts if "=" not in part]
    if len(arguments) > 1:
        raise ConfigError(f"{arguments[1]!r}: expected key=value")
    given: dict[str, Any] = {"argument": _argument(kind, arguments[0]) if arguments else None}
    for part in parts:
        if "=" not in part:
            continue
        key, _, word = part.partition("=")
        if key not in _READERS:
            raise ConfigError(f"{part!r}: expected one of {', '.join(f'{known}=' for known in _READERS)}")
        field = _FIELD.get(key, key)
        if field in given:
            raise ConfigError(f"{part!r}: given twice")
        given[field] = _READERS[key](key, word)
    return Fault(kind=kind, **given)


def _argument(kind: str, word: str) -> str | float:
    if kind == "slow":
        found = _FACTOR.fullmatch(word)
        if found is None:
            raise ConfigError(f"slow {word}: expected a factor above 1, e.g. x3")
        return float(found[1])
    if kind == "exit" and word.isdecimal():
        return int(word)
    if kind.startswith("kill") and f"SIG{word.upper()}" in signal.Signals.__members__:
        return f"SIG{word.upper()}"
    return word


def _read_whole(key: str, word: str) -> int:
    if _WHOLE.fullmatch(word) is None:
        raise ConfigError(f"{key}={word}: expected a whole number")
    return int(word)


def _read_rank(_key: str, word: str) -> int | str:
    if word == "all":
        return word
    if _WHOLE.fullmatch(word) is None:
        raise ConfigError(f"rank={word}: expected a whole number (-1: the last rank), or all")
    return int(word)


def _read_duration(key: str, word: str) -> float:
    found = _DURATION.fullmatch(word)
    if found is None:
        raise ConfigError(f"{key}={word}: expected a duration, e.g. 5, 200ms, 5s, 10m, 2h")
    return float(found[1]) * _UNITS[found[2] or "s"]


def _read_rate(_key: str, word: str) -> float:
    found = _RATE.fullmatch(word)
    if found is None:
        raise ConfigError(f"rate={word}: expected a number per s, m, h or d, e.g. 2/h")
    return float(found[1]) * (SECONDS_PER_HOUR / _UNITS[found[2]])


def _read_mtbf(key: str, word: str) -> float:
    seconds = _read_duration(key, word)
    if not seconds > 0:
        raise ConfigError(f"mtbf={word}: expected a duration > 0")
    return SECONDS_PER_HOUR / seconds


def _read_name(key: str, word: str) -> str:
    if not word:
        raise ConfigError(f"{key}=: expected a name")
    return word


def _read_yes(key: str, word: str) -> bool:
    if word not in ("yes", "no"):
        raise ConfigError(f"{key}={word}: expected yes or no")
    return word == "yes"


def _number(value: float) -> str:
    """Return the shortest digits that are read as the same number."""
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 1e15 else repr(value)


def _seconds(value: float) -> str:
    return f"{_number(value)}s"


_READERS: Final[dict[str, Callable[[str, str], Any]]] = {
    "task": _read_name,
    "node": _read_name,
    "rank": _read_rank,
    "joiner": _read_yes,
    "step": _read_whole,
    "from_step": _read_whole,
    "micro_batch": _read_whole,
    "bucket": _read_whole,
    "phase": _read_name,
    "point": _read_name,
    "world": _read_whole,
    "after": _read_duration,
    "rate": _read_rate,
    "mtbf": _read_mtbf,
    "for": _read_duration,
    "steps": _read_whole,
    "times": _read_whole,
    "seed": _read_whole,
}
_FIELD: Final = {"for": "duration", "mtbf": "rate"}
"""Names of fields that differ from their keys."""
_WRITERS: Final[dict[str, Callable[[Any], str]]] = {
    key: {
        "after": _seconds,
        "for": _seconds,
        "rate": lambda rate: f"{_number(rate)}/h",
        "joiner": lambda yes: "yes",
    }.get(key, str)
    for key in _READERS
    if key != "mtbf"
}
assert {_FIELD.get(key, key) for key in _READERS} == {field.name for field in fields(Fault)} - {"kind", "argument"}


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
        """Read the faults of a file, see `_read_faults`."""
        return cls(_read_faults(Path(path)))

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
