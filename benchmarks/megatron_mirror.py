"""Measure the failure-free cost of mirrors of ZeRO-1 shards: two data-parallel processes, a GPT of 13 M parameters.

    python benchmarks/megatron_mirror.py [STEPS]

Runs on CPU and gloo with the shim. Prints for each setting the median step and the median wait for copies in a step.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")  # hide megatron-core's warnings about packages that are not installed

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from unicron_lightning.megatron import shim  # noqa: E402
from unicron_lightning.megatron.sharded import ShardedOptimizer  # noqa: E402
from unicron_lightning.replica.mirror import Mirror, Redundancy  # noqa: E402
from unicron_lightning.worker.communication.gloo import GlooCommunicator  # noqa: E402

WORLD = 2
WARM_UP = 2
SETTINGS = {"none": {"copies": 0}, "one": {"copies": 1}}


def run(rank: int, folder: Path, name: str, steps: int) -> None:
    """Run one process of one setting."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "megatron"))
    import plain

    from unicron_lightning.megatron import toy

    torch.set_num_threads(1)
    shim.install()
    plain.start(rank, WORLD, folder, name=f"groups-{name}")
    training = plain.build(toy.Toy(layers=4, hidden=512, length=64), zero1=True)
    optimizer = ShardedOptimizer([training.ddp], training.optimizer)
    mirror = Mirror(optimizer, Redundancy(**SETTINGS[name]))
    store = dist.FileStore(str(folder / f"mirror-{name}"), WORLD)
    mirror.join(GlooCommunicator(store, rank, WORLD, "127.0.0.1", timeout=timedelta(seconds=60)))
    step_seconds, wait_seconds = [], []
    for number in range(steps + WARM_UP):
        begin = time.perf_counter()
        training.accumulate(number, 4 * WORLD)
        dist.barrier()
        plain.finalize_model_grads([training.ddp])
        training.optimizer.step()
        waiting = time.perf_counter()
        if SETTINGS[name]["copies"]:
            mirror.keep(number + 1)
        waited = time.perf_counter() - waiting
        if number >= WARM_UP:
            step_seconds.append(time.perf_counter() - begin)
            wait_seconds.append(waited)
    if rank == 0:
        print(
            f"{name:15} step {statistics.median(step_seconds):.3f} s, of which waiting "
            f"{statistics.median(wait_seconds):.4f} s; {sum(map(len, optimizer.pieces)) / 1e6:.2f} million elements "
            f"in the shard, {sum(each.data.nbytes for each in mirror._stored) / 1e6:.0f} MB of host memory for copies",
            flush=True,
        )
    mirror.close()
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    steps = int(arguments[0]) if arguments else 10
    context: Any = mp.get_context("spawn")
    for name in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            children = [context.Process(target=run, args=(rank, Path(folder), name, steps)) for rank in range(WORLD)]
            for child in children:
                child.start()
            for child in children:
                child.join()
                assert child.exitcode == 0, f"setting {name!r} failed"


if __name__ == "__main__":
    main(sys.argv[1:])
