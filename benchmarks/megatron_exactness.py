"""Compare the parameters of three Megatron replicas after three deaths in 20 steps with those of a plain loop.

With three replicas a death changes the order of sums and thus the rounding. The yardstick is the rounding without any
failure: the same plain Megatron loop with one process in place of three, on the same global batches.

    python benchmarks/megatron_exactness.py            # add --zero1 for the distributed optimizer
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from megatron_chaos import plain
from system.cluster import Cluster
from system.megatron import MODEL, SCRIPT, ZERO1, differences, finals

REPLICAS = 3
STEPS = 20
"""Lowest number of steps; the run ends when all replicas are complete again."""
SLOW_SECONDS = 2.0
"""Duration of a step in a smaller world, which keeps the number of steps low."""
DEATHS = (("forward", 1), ("reduced", 0), ("updated", 2))
"""Point in the step, and replica, of each death; without sharded optimizers the last one strikes before the commit."""


def train(folder: Path, model: dict[str, Any], points: list[tuple[str, int]]) -> tuple[int, list[Path]]:
    """Run the training with failures; return its last step and the paths of its workers' parameters."""
    schedule = [{"point": point, "replica": replica, "shard": 0} for point, replica in points]
    settings = {**model, "steps": STEPS, "finish": True, "full": REPLICAS, "slow": SLOW_SECONDS}
    nodes = f"1:{REPLICAS}"
    with Cluster(
        folder, script=SCRIPT, agents=REPLICAS + 1, nodes=nodes, schedule=schedule, settings=settings
    ) as cluster:
        struck = [folder / f"struck-{number}" for number in range(len(points))]
        cluster.watch(lambda: all(path.exists() for path in struck), "all deaths", 600, 120)
        (folder / "finish").touch()
        cluster.wait_exit(300)
        cluster.wait_end()
    return finals(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero1", action="store_true", help="with the distributed optimizer, and without clipping")
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()
    model = {**MODEL, "dp": REPLICAS, **(ZERO1 if arguments.zero1 else {})}
    model["optimizer"] = {**model["optimizer"], "lr": arguments.lr}
    points = [(point if arguments.zero1 or point != "updated" else "commit", replica) for point, replica in DEATHS]
    alone = {**model, "dp": 1, "accumulation": REPLICAS * model["accumulation"]}
    with tempfile.TemporaryDirectory(prefix="megatron-exactness-") as name:
        folder = Path(name)
        step, paths = train(folder, model, points)
        found = differences(paths, plain(folder / "plain", model, step))
        rounding = differences(paths[:1], plain(folder / "alone", alone, step))
    assert len(found) == REPLICAS
    print(
        f"{len(points)} deaths in {step} steps, largest difference of a parameter: {max(found.values()):.1e} from the "
        f"plain loop with {REPLICAS} processes, {max(rounding.values()):.1e} from that with one"
    )


if __name__ == "__main__":
    main()
