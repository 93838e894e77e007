"""Faults as values: kind, place and time. Nothing here carries out a fault; texts are in `language`."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from unicron_lightning.errors import ConfigError
from unicron_lightning.faults.examples import EXAMPLES

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
FaultPhase = Literal[
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
PHASES: Final[tuple[FaultPhase, ...]] = get_args(FaultPhase)
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
    phase: FaultPhase | None = None
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
