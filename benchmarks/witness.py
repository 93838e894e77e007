"""Measure what a witness finds, and what it costs: docs/trust.md.

    OMP_NUM_THREADS=1 python benchmarks/witness.py [--sizes 1M 10M] [--micro-batches 1 4 16] [--steps 6] [--trials 400]

Detection: of a few ranks one is wrong in one of n calls, at random. The plan of witnesses and the decision are those of
the package; digests are drawn instead of computed. Shown is the mean number of steps until the rank is found, beside
the formula k / (1 - (1 - 1/n)^2) (steps with a witness come every k, and one finds it as owner or as witness), and how
many of its wrong micro-batches are in the model by then.

Cost: one process trains a GPT in float32 with AdamW, in steps that alternate between ones with and without a witness.
The cost of a step with a witness is shown as a share of one without, in seconds of the processor; with
``witness_every=k`` the training has a k-th of it. The exchange of digests is not in it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time

import torch
from torch import nn
from transformer import SIZES, Transformer, Walks, loss_of

from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.communication.communicator import SoloCommunicator
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.exact_sums import step_sums
from unicron_lightning.worker.module_buffers import ModuleBuffers
from unicron_lightning.worker.step import GradientStep
from unicron_lightning.worker.sums import NormStatistics, SumsLayout
from unicron_lightning.worker.witness import AGAIN, Witness, WitnessedStep, in_doubt, judge

RANKS, SHARE, BROKEN = 4, 4, 1
NONE = GradientBuckets([("none", nn.Parameter(torch.zeros(1)))], 1, False)


def until_found(chance: random.Random, every: int, calls: int) -> tuple[int, int, int]:
    """Return the steps until the broken rank is found, its wrong micro-batches in the model, and right ranks blamed."""

    def result(rank: int) -> int:
        return chance.getrandbits(52) if rank == BROKEN and chance.random() < 1 / calls else 0

    witness, committed, blamed = Witness(every, compare=True), 0, 0
    for number in itertools.count(1):
        own = [result(BROKEN) for _ in range(SHARE)]
        if number % every == 0:
            found: list[dict[int, list[int]]] = []
            for rank in range(RANKS):
                step = WitnessedStep(witness, number, NONE, lambda _: None)
                step.plan(rank, RANKS, lambda each: range(each, RANKS * SHARE, RANKS))
                assert step.own is not None and step._other is not None
                first = own[step.own // RANKS] if rank == BROKEN else 0
                found.append({step.own: [first], step._other: [result(rank)]})
            for micro_batch in in_doubt(found):
                runs = {
                    r: [*each.get(micro_batch, ()), *(result(r) for _ in range(AGAIN))] for r, each in enumerate(found)
                }
                wrong = judge(runs).wrong
                blamed += sum(rank != BROKEN for rank in wrong)
                if BROKEN in wrong:
                    return number, committed, blamed
        committed += sum(map(bool, own))
    raise AssertionError


def detection(every: int, calls: int, trials: int) -> str:
    """Return a row of the table."""
    chance = random.Random(every * calls)
    steps, committed, blamed = zip(*(until_found(chance, every, calls) for _ in range(trials)), strict=True)
    expected = every / (1 - (1 - 1 / calls) ** 2)
    mean, error = statistics.mean(steps), statistics.stdev(steps) / trials**0.5
    in_model = statistics.mean(committed)
    return f"| {calls} | {every} | {mean:.0f} ± {error:.0f} | {expected:.0f} | {in_model:.1f} | {sum(blamed)} |"


class Training:
    """Steps of a model, with a witness or without.

    Args:
        size: of the model.
    """

    def __init__(self, size: str) -> None:
        torch.manual_seed(0)
        shape = SIZES[size]
        self.model = Transformer(shape)
        walks = Walks(shape.sequences, shape.context)
        self.batch = torch.stack([walks[place] for place in range(shape.sequences)])
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._gradients = GradientBuckets(self.model.named_parameters(), 25 << 20, True)
        self._layout, self._nothing = SumsLayout(), nn.Module()
        self._engine = Engine(None, lambda *_: SoloCommunicator(), lambda world: None, False)

    def step(self, micro_batches: int, witness: Witness | None) -> float:
        """Return the processor's seconds of a step."""
        began, numbers = time.process_time(), list(range(micro_batches))
        self._gradients.begin()
        parts = (NormStatistics(self._nothing), ModuleBuffers(self._nothing), self._gradients, None)
        sums = step_sums(self._layout, *parts, numbers)

        def repeat(_: int) -> None:
            self.loss = loss_of(self.model, self.batch)
            (self.loss / micro_batches).backward()

        def run(number: int) -> None:
            repeat(number)
            sums.add(self.loss, (), number)

        witnessed = None if witness is None else witness.of_step(0, self._gradients, repeat)
        if witnessed is not None:
            witnessed.plan(0, 2, lambda rank: numbers if rank == 0 else [micro_batches])
        self._engine.run(GradientStep(numbers, self._gradients, sums, run, witness=witnessed))
        *_, used = sums.finish()
        self._gradients.install(used)
        self._optimizer.step()
        return time.process_time() - began


def cost(size: str, micro_batches: int, steps: int) -> str:
    """Return a row of the table."""
    training = Training(size)
    times: dict[bool, list[float]] = {False: [], True: []}
    for step in range(steps + 2):
        for has, found in times.items():
            seconds = training.step(micro_batches, Witness(1, compare=True) if has else None)
            if step > 1:
                found.append(seconds)
    plain, witnessed = (statistics.median(found) for found in times.values())
    parameters = sum(each.numel() for each in training.model.parameters())
    share = 100 * (witnessed - plain) / plain
    every = max(1, round(share / 0.5))
    return (
        f"| {parameters / 1e6:.1f} M | {micro_batches} | {1e3 * plain:.0f} ms | {1e3 * witnessed:.0f} ms | "
        f"{share:.0f} % | {100 / micro_batches:.0f} % | {every} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1M", "10M"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--trials", type=int, default=400)
    options = parser.parse_args()
    print("| wrong: one call of | witness_every | steps until found | formula | in the model | right ranks blamed |")
    print("|---|---|---|---|---|---|")
    for calls, every in itertools.product((1, 10, 100), (1, 10, 100)):
        print(detection(every, calls, options.trials), flush=True)
    print("\n| parameters | micro-batches | step | with a witness | more | 1/m | k for 0.5 % |")
    print("|---|---|---|---|---|---|---|")
    for size, number in itertools.product(options.sizes, options.micro_batches):
        print(cost(size, number, options.steps), flush=True)


if __name__ == "__main__":
    main()
