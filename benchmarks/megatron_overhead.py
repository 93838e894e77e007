"""Measure the strategy's failure-free cost for a Megatron model: tokens per second against a plain megatron-core loop.

    python benchmarks/megatron_overhead.py [--tp 1] [--cp 1] [--ep 1] [--pp 2] [--vpp 1] [--dp 2] [--pairs 10] ...

The same processes alternate between some steps of `Trainer.fit` under ``unicron_megatron`` and as many of the loop of
Megatron's examples, over a second model of the same sizes and the same process groups. Other load on the machine thus
affects both alike. The figure is the ratio of the median step times. CPU, gloo and the shim are used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from system.cluster import Cluster

JOB = Path(__file__).resolve().parent / "job_megatron.py"
SIZES = (
    ("tp", 1),
    ("cp", 1),
    ("ep", 1),
    ("pp", 2),
    ("vpp", 1),
    ("dp", 2),
    ("pairs", 10),
    ("steps", 10),
    ("layers", 4),
    ("hidden", 128),
)


def main() -> None:
    """Run the workers and print the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in SIZES:
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = vars(parser.parse_args())
    workers = arguments["tp"] * max(arguments["cp"], arguments["ep"]) * arguments["pp"] * arguments["dp"]
    with tempfile.TemporaryDirectory(prefix="megatron-") as name:
        folder = Path(name)
        settings = {**arguments, "workers": workers}
        with Cluster(folder, script=JOB, agents=workers, nodes=f"{workers}:{workers}", settings=settings) as cluster:
            cluster.wait_exit(3000)
            cluster.wait_end()
        tokens, ours, plain = json.loads((folder / "times.json").read_text())
    fast, base = tokens / statistics.median(ours), tokens / statistics.median(plain)
    sizes = " ".join(f"{name.upper()}={arguments[name]}" for name in ("tp", "cp", "ep", "pp", "vpp", "dp"))
    print(f"{sizes}, {len(ours)} steps each")
    print(f"tokens/s of plain megatron-core: {base:.0f}; under unicron_megatron: {fast:.0f}; ratio {fast / base:.3f}")


if __name__ == "__main__":
    main()
