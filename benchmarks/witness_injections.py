"""Flip bits in the training of some ranks, and see when a witness finds them: docs/trust.md.

    python benchmarks/witness_injections.py [--trials 20] [--ranks 5]

Engines, steps, witnesses and decisions are the package's; the workers are threads of one process, with a small net in
float64 and SGD with momentum. A random bit flips in one of n calls of a micro-batch: in an activation, or in a
gradient; or before one of n steps: in a parameter, in the optimizer's state, or in the result of the reduction, of one
rank or two. Shown are the mean steps of a broken rank from its first wrong bit until it is found, and the formula: for
calls k / (1 - (1 - 1/n)^2) steps, from the start. A parameter that is wrong stays so: it is found in the next step with
a witness, after (k + 1) / 2 steps on average. A wrong reduction shows one step later, the optimizer's state two.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from worker.simulation import Coordinator, Killed, run_threads

from unicron_lightning.errors import ConfigError, GradientsDiffer, SilentCorruption
from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.exact_sums import step_sums
from unicron_lightning.worker.module_buffers import ModuleBuffers
from unicron_lightning.worker.step import GradientStep
from unicron_lightning.worker.sums import NormStatistics, SumsLayout
from unicron_lightning.worker.witness import Witness

MICRO_BATCHES = 10
CALLS = ("activation", "gradient")
STATES = ("parameter", "reduction", "optimizer")
"""With the numbers of steps until a gradient is wrong."""
PATIENCE = 12
"""Times the formula after which a rank counts as not found."""


class Injection(NamedTuple):
    """Wrong bits: where, in one of how many calls or steps, on how many ranks, with ``witness_every``."""

    place: str
    calls: int
    ranks: int
    every: int

    @property
    def formula(self) -> float:
        """Expected steps until a broken rank is found."""
        if self.place in CALLS:
            return self.every / (1 - (1 - 1 / self.calls) ** 2)
        return (self.every + 1) / 2 + STATES.index(self.place)


class FlippedRank:
    """A rank's training.

    Args:
        engine: of the rank.
        injection: of all broken ranks.
        broken: whether this is one.
        seed: of its wrong bits.
    """

    def __init__(self, engine: Engine, injection: Injection, seed: int, *, broken: bool) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.broken, self.first, self.found, self.undecided = broken, 0, 0, False
        self._engine, self._injection, self._chance = engine, injection, random.Random(seed)
        self._optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self._layout, self._nothing = SumsLayout(), nn.Module()
        self._witness = Witness(injection.every, compare=True)
        self._step = 0
        if broken and injection.place == "activation":
            self.net[1].register_forward_hook(lambda module, given, found: self._maybe_flipped(found))
        if broken and injection.place == "gradient":
            self.net[0].weight.register_hook(self._maybe_flipped)

    def __call__(self) -> None:
        gradients = GradientBuckets(self.net.named_parameters(), 1 << 10, True)
        most = PATIENCE * int(1 + self._injection.formula * (1 if self._injection.place in CALLS else 10))
        workers = len(self._engine.world.workers) if self._step else 0
        try:
            while self._step < most and workers != self._left:
                self._engine.step = self._step
                self._step += 1
                self._train(gradients)
                workers = len(self._engine.world.workers)
        except (SilentCorruption, GradientsDiffer, ConfigError) as error:
            self.found, self.undecided = self._step, not isinstance(error, SilentCorruption)
            raise Killed from error
        finally:
            gradients.close()
            self._engine.close()

    _left = 0
    """Number of right ranks, which end when all others have."""

    def _train(self, gradients: GradientBuckets) -> None:
        numbers, place = range(MICRO_BATCHES), self._injection.place
        if place == "parameter":
            self._maybe_flip(self.net[0].weight)
        gradients.begin()
        parts = (NormStatistics(self._nothing), ModuleBuffers(self._nothing), gradients, None)
        sums = step_sums(self._layout, *parts, numbers)

        def repeat(micro_batch: int) -> Tensor:
            generator = torch.Generator().manual_seed(MICRO_BATCHES * self._step + micro_batch)
            loss: Tensor = self.net(torch.randn(2, 3, generator=generator, dtype=torch.float64)).square().sum()
            loss.backward()
            return loss.detach()

        def run(micro_batch: int) -> None:
            sums.add(repeat(micro_batch), (), micro_batch)

        witness = self._witness.of_step(self._step - 1, gradients, repeat)  # type: ignore[arg-type]
        self._engine.run(GradientStep(numbers, gradients, sums, run, witness=witness))
        if place == "reduction":
            self._maybe_flip(gradients.buckets[0].reduced)
        *_, used = sums.finish()
        gradients.install(used)
        self._optimizer.step()
        if place == "optimizer":
            self._maybe_flip(self._optimizer.state[self.net[0].weight]["momentum_buffer"])

    def _is_due(self) -> bool:
        due = self.broken and self._chance.random() < 1 / self._injection.calls
        self.first = self.first or (self._step if due else 0)
        return due

    def _maybe_flipped(self, value: Tensor) -> Tensor:
        return value + (self._flipped(value.detach()) - value.detach()) if self._is_due() else value

    def _maybe_flip(self, value: Tensor) -> None:
        if self._is_due():
            with torch.no_grad():
                value.copy_(self._flipped(value.detach()))

    def _flipped(self, value: Tensor) -> Tensor:
        """Flip one of the upper 36 bits of the mantissa: lower ones may vanish in a sum."""
        bits = torch.zeros(value.numel(), dtype=torch.int64)
        bits[self._chance.randrange(value.numel())] = 1 << self._chance.randrange(16, 52)
        return (value.contiguous().view(-1).view(torch.int64) ^ bits).view(torch.float64).view(value.shape)


def trial(injection: Injection, ranks: int, seed: int) -> list[FlippedRank]:
    """Train once; return the workers."""
    coordinator = Coordinator(seed=seed)
    names = [f"w{rank}" for rank in range(ranks)]
    broken = random.Random(seed).sample(names, injection.ranks)
    workers = {
        name: FlippedRank(coordinator.worker(name), injection, 1000 * seed + place, broken=name in broken)
        for place, name in enumerate(names)
    }
    for worker in workers.values():
        worker._left = ranks - injection.ranks
    coordinator.start()
    run_threads(coordinator, list(workers.items()))
    return list(workers.values())


def row(injection: Injection, ranks: int, trials: int) -> str:
    """Return a row of the table."""
    found = [worker for seed in range(trials) for worker in trial(injection, ranks, seed)]
    broken = [each for each in found if each.broken]
    starts_at_once = injection.place in CALLS
    steps = [
        each.found - (1 if starts_at_once else each.first) + 1 for each in broken if each.found and not each.undecided
    ]
    blamed = sum(bool(each.found) and not each.undecided for each in found if not each.broken)
    undecided = sum(each.undecided for each in found)
    mean = statistics.mean(steps) if steps else float("nan")
    error = statistics.stdev(steps) / len(steps) ** 0.5 if len(steps) > 1 else 0.0
    of = f"{injection.calls} {'calls' if starts_at_once else 'steps'}"
    return (
        f"| {injection.place} | {of} | {injection.ranks} | {injection.every} | {len(steps)} of {len(broken)} | "
        f"{mean:.1f} ± {error:.1f} | {injection.formula:.1f} | {blamed} | {undecided} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=5)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    print("| wrong | one of | ranks | witness_every | found | steps until found | formula | right blamed | undecided |")
    print("|---|---|---|---|---|---|---|---|---|")
    for ranks in (1, 2):
        calls = [Injection(place, n, ranks, every) for place in CALLS for n in (1, 10) for every in (1, 10)]
        for injection in [*calls, *(Injection(place, 10, ranks, every) for place in STATES for every in (1, 10))]:
            print(row(injection, options.ranks, options.trials), flush=True)


if __name__ == "__main__":
    main()
