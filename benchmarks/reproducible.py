"""Measure the cost of the reproducible mode: time of a step, memory and bytes of the reduction.

    OMP_NUM_THREADS=1 python benchmarks/reproducible.py [--sizes 1M 10M] [--micro-batches 1 4 16] [--steps 6]
    python benchmarks/reproducible.py --device cuda --sizes 100M

One process trains a GPT in float32 with AdamW, in steps that alternate between sums of floats and sums of integers. The
cost is the difference of the medians of all step times, as a share of a step with sums of floats; on the CPU they are
seconds of the processor, which other load changes less. The cost depends on the
computation of a micro-batch for each parameter: tokens are shown, and more sequences make it smaller. The reduction
over ranks is not in it; `bytes` has the ratio of what it sends.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from models import GPT
from torch import Tensor, nn
from transformer import SIZES, Walks

from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.communication.communicator import SoloCommunicator
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.exact_sums import ExactGradients, step_sums
from unicron_lightning.worker.module_buffers import ModuleBuffers
from unicron_lightning.worker.step import GradientStep
from unicron_lightning.worker.sums import NormStatistics, SumsLayout


class Training:
    """Steps of a model with one kind of sums.

    Args:
        model: trained.
        kind: of the sums.
        optimizer: of the model.
        batch: a micro-batch.
    """

    def __init__(
        self, model: GPT, kind: type[GradientBuckets], optimizer: torch.optim.Optimizer, batch: Tensor
    ) -> None:
        self._model, self._optimizer, self._batch = model, optimizer, batch
        self.gradients = kind(model.named_parameters(), 25 << 20, True)
        self._layout = SumsLayout()
        self._engine = Engine(None, lambda *_: SoloCommunicator(), lambda world: None, False)
        nothing = nn.Module()
        self._norms, self._buffers = NormStatistics(nothing), ModuleBuffers(nothing)

    def step(self, micro_batches: int) -> float:
        """Return the seconds of a step."""
        clock = time.perf_counter if self._batch.is_cuda else time.process_time
        began, numbers = clock(), list(range(micro_batches))
        self.gradients.begin()
        sums = step_sums(self._layout, self._norms, self._buffers, self.gradients, None, numbers)

        def run(number: int) -> None:
            logits = self._model(self._batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), self._batch[:, 1:].flatten())
            (loss / micro_batches).backward()
            sums.add(loss, (), number)

        self._engine.run(GradientStep(numbers, self.gradients, sums, run))
        *_, used = sums.finish()
        self.gradients.install(used)
        self._optimizer.step()
        if self._batch.is_cuda:
            torch.cuda.synchronize()
        return clock() - began

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the buckets beside the parameters' own gradients, and of what is reduced."""
        reduced = sum(each.reduced.nbytes for each in self.gradients.buckets)
        parts = (getattr(each, name, None) for each in self.gradients.buckets for name in ("_local", "_result"))
        return reduced + sum(part.nbytes for part in parts if part is not None), reduced


def measured(size: str, micro_batches: int, steps: int, device: str, sequences: int | None) -> str:
    """Return a row of the table."""
    torch.manual_seed(0)
    shape = SIZES[size]
    number = sequences or shape.sequences
    model = GPT(shape).to(device)
    parameters = sum(each.numel() for each in model.parameters())
    walks = Walks(number, shape.context)
    batch = torch.stack([walks[place] for place in range(number)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    floats, integers = (Training(model, kind, optimizer, batch) for kind in (GradientBuckets, ExactGradients))
    times: dict[Callable[[int], float], list[float]] = {floats.step: [], integers.step: []}
    for step in range(steps + 2):
        for run, found in times.items():
            seconds = run(micro_batches)
            if step > 1:
                found.append(seconds)
    plain, exact = (statistics.median(found) for found in times.values())
    (held, sent), (exact_held, exact_sent) = floats.nbytes, integers.nbytes
    share = 100 * (exact - plain) / plain
    return (
        f"| {parameters / 1e6:.1f} M | {micro_batches} | {number * shape.context} | {1e3 * plain:.0f} ms | "
        f"{1e3 * exact:.0f} ms | {share:.1f} % | {(exact_held - held) / parameters:.0f} | {exact_sent / sent:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1M", "10M"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sequences", type=int)
    options = parser.parse_args()
    print("| parameters | micro-batches | tokens of each | floats | integers | cost | bytes of a parameter | sent |")
    print("|---|---|---|---|---|---|---|---|")
    for size in options.sizes:
        for number in options.micro_batches:
            print(measured(size, number, options.steps, options.device, options.sequences), flush=True)


if __name__ == "__main__":
    main()
