"""Measure the failure-free cost of ``unicron_fsdp``: steps per second and memory beside plain FSDP2 with the same mesh.

    python benchmarks/fsdp_overhead.py [--shards 2] [--replicas 2] [--share 2] [--pairs 6] [--steps 10] [--layers 4] ...
    python benchmarks/fsdp_overhead.py --memory 1 --layers 8 --hidden 512 --steps 4 --pairs 1

The same processes alternate between some steps of `Trainer.fit` under ``unicron_fsdp`` and as many of a loop over
plain FSDP2 on a mesh of R x S (HSDP). Other load on the machine thus affects both alike. The figure is the ratio of the
median step times. With ``--memory 1`` both run apart, the plain one under torchrun, and the figure is the peak of each
worker's resident memory beyond that before the model is made. Tensors then have pages of their own: otherwise the
fragmented heap, which differs from run to run, is twice as large as they are. CPU and gloo are used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from system.cluster import Cluster

JOB = Path(__file__).resolve().parent / "job_fsdp.py"
SIZES = {"shards": 2, "replicas": 2, "share": 2, "pairs": 6, "steps": 10, "layers": 4, "hidden": 128, "memory": 0}


def train(folder: Path, settings: dict[str, Any]) -> None:
    """Run the workers under the strategy."""
    workers = settings["shards"] * settings["replicas"]
    with Cluster(folder, script=JOB, agents=workers, nodes=f"{workers}:{workers}", settings=settings) as cluster:
        cluster.wait_exit(3000)
        cluster.wait_end()


def peaks(folder: Path, name: str) -> list[int]:
    """Memory of each worker, in MiB."""
    return sorted(int(path.read_text()) for path in folder.glob(f"memory-{name}-*"))


def main() -> None:
    """Run the workers and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    settings = vars(parser.parse_args())
    if settings["memory"]:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "262144"
    shape = f"S={settings['shards']} R={settings['replicas']}, {settings['layers']} layers of {settings['hidden']}"
    with tempfile.TemporaryDirectory(prefix="fsdp-") as name:
        folder = Path(name)
        train(folder, settings)
        if settings["memory"]:
            workers = settings["shards"] * settings["replicas"]
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
            subprocess.run([*command, str(JOB), str(folder)], check=True, capture_output=True)
            print(f"{shape}: peak memory of the workers in MiB: plain FSDP2 {peaks(folder, 'plain')}, ", end="")
            print(f"unicron_fsdp {peaks(folder, 'ours')}")
            return
        ours, plain = json.loads((folder / "times.json").read_text())
    fast, base = 1 / statistics.median(ours), 1 / statistics.median(plain)
    print(f"{shape}: {len(ours)} steps each; steps/s of plain FSDP2 {base:.2f}, unicron_fsdp {fast:.2f}; ", end="")
    print(f"ratio {fast / base:.3f}")


if __name__ == "__main__":
    main()
