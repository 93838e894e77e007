"""Faults that the workers of tests/fsdp/train.py inject into themselves, at exact points of the program.

A fault is {"point", "nth", "from_step", ...}: the worker dies when it is at the point for the ``nth`` time as the fault
describes, or fails in another "way" of `WAYS`. Faults strike in sequence, one worker each. One with a "replica" and a
"shard" strikes the worker at that place of a complete world, in a later step than the fault before, and after
"settled" further steps of that world.
One with a "role" strikes a worker that has it in an incomplete world, or during the entry into a complete one: a
"spare" without a complete replica, a "joiner", a "partner" of a joiner in its new replica, a "donor" of their state, or
another "worker" while two replicas continue. One without a "point" is an operator's order, which the harness gives.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from unicron_lightning.checkpoints import saving
from unicron_lightning.fsdp.gradients import ShardedGradients
from unicron_lightning.fsdp.mesh import ShardGroup
from unicron_lightning.fsdp.model import FsdpShard
from unicron_lightning.replica.channels import COALESCED_REDUCE_SCATTERS, COLLECTIVES, REDUCE_SCATTERS

STEP = (
    *("call", "forward", "all-gather", "backward", "reduce-scatter", "reduce", "reduction", "reduced", "gate"),
    *("norm", "commit", "committed", "optimizer", "optimized", "hooks"),
)
"""Points of a step, in the order of the program."""
PASS = ("validation", "evaluated")
"""Points of a validation."""
CHECKPOINT = ("collect", "checkpoint")
"""Points of a checkpoint; the second one is on rank 0 only."""
FOLDER = ("part",)
"""Points of a checkpoint that is a folder: a worker's shard is written, the index is not."""
ENTRY = ("exchange", "connect", "transfer", "join")
"""Points of the entry into an epoch."""


def _wait_for_ever() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def _keep_the_interpreter() -> None:
    """Call a C function that never returns, not even when a signal arrives, as ``sleep`` does."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # zeros: an unlocked mutex
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


WAYS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _wait_for_ever,
    "lock": _keep_the_interpreter,
}
"""Ways to fail: death; a stop without further heartbeats; the training thread waits for ever, and the control thread
lives; a C call keeps the interpreter's lock for ever.
"""


class Faults:
    """Kills this worker as planned.

    Args:
        folder: with the schedule.
        note: records a fault.
    """

    def __init__(self, folder: Path, note: Callable[..., None]) -> None:
        self._folder, self._note = folder, note
        path = folder / "schedule.json"
        self._schedule: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        self._seen: Counter[int] = Counter()
        self._steps: Counter[int] = Counter()
        self._trainer: Any = None
        self._strategy: Any = None

    def attend(self, trainer: pl.Trainer, blocks: Iterable[nn.Module]) -> None:
        """Watch a run's points."""
        self._trainer, self._strategy = trainer, trainer.strategy
        strategy = self._strategy
        strategy.engine.fault = self.point
        register_optimizer_step_pre_hook(lambda *_: self.point("optimizer"))
        register_optimizer_step_post_hook(lambda *_: self.point("optimized"))
        for block in blocks:
            block.register_forward_hook(self._in_backward)
        _before(ShardedGradients, "_sum", lambda: self.point("reduction"))
        _before(FsdpShard, "finalize", lambda: self.point("norm"))
        _before(FsdpShard, "state", lambda: self.point("transfer"))
        _after(saving, "write_part", lambda: self.point("part"))
        _before(FsdpShard, "load_state", lambda: self.point("transfer"))
        for name in (*COLLECTIVES, *REDUCE_SCATTERS, *COALESCED_REDUCE_SCATTERS):
            if "reduce_scatter" in name and hasattr(ShardGroup, name):
                _after(ShardGroup, name, lambda: self.point("reduce-scatter"))
            elif "gather" in name and hasattr(ShardGroup, name):
                _after(ShardGroup, name, lambda: self.point("all-gather"))

    def point(self, point: str, *_: Any) -> None:
        """Die if the present fault is meant for this worker here."""
        if point == "hooks":
            self._steps[self._strategy.engine.world.epoch] += 1
        number = next((n for n in range(len(self._schedule)) if not self._struck(n).exists()), None)
        if number is None or self._strategy.fabric.place is None:
            return
        fault, step = self._schedule[number], self._trainer.global_step
        if fault.get("point") != point or not self._meant(fault, number, step):
            return
        self._seen[number] += 1
        if self._seen[number] <= fault.get("nth", 0):
            return
        try:
            (self._folder / f"claimed-{number}").touch(exist_ok=False)
        except FileExistsError:
            return
        self._note("fault", number=number, step=step, epoch=self._strategy.engine.world.epoch, **fault)
        mark = self._folder / f"striking-{number}"
        mark.write_text(str(step))
        mark.rename(self._struck(number))
        WAYS[fault.get("way", "kill")]()

    def over(self) -> bool:
        """Whether all faults have struck."""
        return all(self._struck(number).exists() for number in range(len(self._schedule)))

    def role(self) -> str:
        """This worker's role in the newest epoch."""
        fabric, place = self._strategy.fabric, self._strategy.fabric.place
        layout = place.layout
        if place.replica is None:
            return "spare"
        if place.rank in layout.stale:
            return "partner" if self._strategy.engine.has_state else "joiner"
        if any(layout.shards[rank] == fabric.shard for rank in layout.stale):
            return "donor"  # one of them: all that have the state send parts of it
        return "worker" if sum(replica.continues for replica in layout.replicas) > 1 else "last"

    def _meant(self, fault: dict[str, Any], number: int, step: int) -> bool:
        fabric, place = self._strategy.fabric, self._strategy.fabric.place
        whole = len(place.layout.replicas) == fabric.shape.replicas
        if "role" in fault:
            entering = fault["point"] in ENTRY
            there = fault["role"] == self.role() and fault.get("shard", fabric.shard) == fabric.shard
            return there and (entering or not whole)
        later = number == 0 or step > int(self._struck(number - 1).read_text() or 1 << 30)
        here = fault["replica"] == place.replica and fault["shard"] == fabric.shard
        settled = self._steps[self._strategy.engine.world.epoch] >= fault.get("settled", 0)
        return whole and here and later and settled and step >= fault.get("from_step", 2)

    def _in_backward(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self.point("backward"))

    def _struck(self, number: int) -> Path:
        return self._folder / f"struck-{number}"


def _before(owner: type, name: str, point: Callable[[], None]) -> None:
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        point()
        return method(*args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, point: Callable[[], None]) -> None:
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        point()
        return result

    setattr(owner, name, wrapped)
