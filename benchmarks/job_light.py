"""The step protocol without Lightning: an engine, its control connection and small gradients, for many processes.

Each micro-batch is emulated by a sleep, so that more workers than cores do not wait for each other.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unicron_lightning import environ, wire
from unicron_lightning.worker.buckets import FlatBucket, GradientBuckets
from unicron_lightning.worker.communication.backends import DataPlane
from unicron_lightning.worker.control.activity import Activity
from unicron_lightning.worker.control.monitor import Monitor
from unicron_lightning.worker.control.thread import Control
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Agreement, Join
from unicron_lightning.worker.step import GradientStep

MICRO_BATCHES = 2
"""Micro-batches per worker and step, of the world at the start."""
MICRO_SECONDS = float(os.environ.get("BENCH_MICRO_SECONDS", "0.2"))
WIDTH = 128


class Count:
    """`worker.step.Sums`: the number of micro-batches, which each rank sends with its commit."""

    buckets: Sequence[FlatBucket] = ()

    def __init__(self) -> None:
        self.own, self.total = 0, 0.0

    def totals(self) -> list[float]:
        return [float(self.own)]

    def read(self, totals: Sequence[float]) -> bool:
        (self.total,) = totals
        return False

    def settle(self, engine: Engine) -> None:
        raise AssertionError("nothing to settle")


class Job:
    """A worker's run."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        own = environ.read()
        self._file = (Path(os.environ["BENCH_LOG"]) / f"worker_{os.getpid()}.jsonl").open("a", buffering=1)
        activity = Activity()
        monitor = Monitor(own.worker, activity, on_cpu=True)
        self.control = Control(own.agent_socket, own.worker, own.local_rank, self._failed, monitor)
        plane = DataPlane(own.host, torch.device("cpu"))
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.gradients = GradientBuckets(self.model.named_parameters(), 1 << 25, overlap=True)
        self.control.hello(1 << 16, None, plane.port)
        welcome = self.control.wait_welcome()
        self.founder = welcome.founder
        self._engine = Engine(self.control, plane, lambda world: None, not self.founder, activity)
        self._engine.fault = self._reached
        if self.founder:
            self.control.ready(0, {"step": 0, "has_state": True, "founder": True})
            with self.control.condition:
                self.control.condition.wait_for(lambda: self.control.latest is not None)
        else:
            self.control.ready(0, {"step": 0, "has_state": False})
        self.log("ready")

    def run(self, micro_batches: int) -> None:
        """Train until the process is killed."""
        if self.founder:
            self._engine.run(Agreement("start", lambda rank: b""))
            step = 0
        else:
            join = Join(lambda: b"")
            self._engine.run(join)
            step = self._engine.step
        self._engine.has_state = True
        while True:
            self._engine.step = step
            self._engine.switch(Join(lambda: b"state"))
            self._step(step, micro_batches)
            step += 1
            self._engine.step = step
            self.control.progress(step, {})

    def log(self, event: str, **fields: Any) -> None:
        """Append an event."""
        line = {"t": time.time(), "event": event, "pid": os.getpid(), **fields}
        self._file.write(json.dumps(line) + "\n")

    def _step(self, step: int, micro_batches: int) -> None:
        count = Count()
        self.gradients.begin()

        def run(number: int) -> None:
            time.sleep(MICRO_SECONDS)
            self.model(torch.full((4, WIDTH), float(number))).square().mean().backward()
            count.own += 1
            self.log("micro", step=step, micro=number)

        operation = GradientStep(range(micro_batches), self.gradients, count, run)
        self._engine.run(operation)
        assert count.total == micro_batches, f"{count.total} micro-batches, expected {micro_batches}"
        self.log("step", step=step, world=self._engine.world.size)

    def _reached(self, point: str, *where: Any) -> None:
        if point in ("exchange", "connect"):
            self.log(point, epoch=where[0])

    def _failed(self, epoch: wire.Epoch) -> None:
        self.log("notified", epoch=epoch.number)
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.abort(epoch)


if __name__ == "__main__":
    Job().run(MICRO_BATCHES * int(os.environ["BENCH_WORKERS"]))
