"""Kill a worker of a sharded model in the middle of an accumulation window, under this system and under torchft.

    python benchmarks/fsdp_recovery.py [--runs 5] [--torchft-venv VENV]

The work, the kill and the figures are those of `recovery`, with four workers: two replicas of two shards (FSDP2, gloo).
Here each worker has an agent; torchft's replica groups have a torchrun of two workers each, which restarts both.
"""

from __future__ import annotations

import os

os.environ["BENCH_WORKERS"] = "4"

import argparse
import json
import shutil
from pathlib import Path

from measure import Figures
from recovery import HERE, TASK, Run, kill_worker, pythons, table
from workload import WORKERS

from unicron_lightning.local_cluster.processes import free_port

GROUPS = 2


class ShardedRun(Run):
    """A run of one system with a sharded model; see `Run`."""

    def start_agent(self, slot: int) -> None:
        environment = {"BENCH_WORKERS": str(WORKERS)}
        command: list[str | Path] = [self._bin / "torchrun", "--max-restarts=1000"]
        if self.system == "unicron":
            command += ["--nproc-per-node=1", f"--nnodes=2:{WORKERS}", "--rdzv-backend=unicron"]
            command += [f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-id={TASK}", f"--rdzv-conf=node=n{slot}"]
            command += [HERE / "job_fsdp_recovery.py"]
            environment |= {"BENCH_SLOT": str(slot)}
        elif slot < GROUPS:
            command += [f"--nproc-per-node={WORKERS // GROUPS}", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
            command += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", f"--rdzv-id=group{slot}"]
            command += [HERE / "job_torchft_fsdp.py"]
            environment |= {"REPLICA_GROUP_ID": str(slot), "NUM_REPLICA_GROUPS": str(GROUPS)}
            environment |= {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}"}
        else:
            return
        self.processes.start(f"agent{slot}", command, **environment)


def measure(system: str, folder: Path, python: Path) -> Figures:
    """Run one system with one death and return the figures."""
    shutil.rmtree(folder, ignore_errors=True)
    run = ShardedRun(system, folder, python)
    try:
        run.start()
        figures = kill_worker(run, "worker")
    except TimeoutError as error:
        figures = {"error": str(error)}
    finally:
        run.processes.stop()
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    return {"system": system, "fault": "worker", "load": round(os.getloadavg()[0], 2), **rounded}


def main() -> None:
    """Run the series and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--torchft-venv", type=Path, help="virtual environment with torchft-nightly")
    parser.add_argument("--output", type=Path, default=Path("bench-output/fsdp_recovery"))
    arguments = parser.parse_args()
    results = []
    for number in range(arguments.runs):
        for system, python in pythons(("unicron", "torchft"), arguments.torchft_venv).items():
            results.append(measure(system, arguments.output / f"{system}-{number}", python))
            print(json.dumps(results[-1]), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
