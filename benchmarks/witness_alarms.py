"""Train without faults, with a witness in every step: every difference of gradients is a false alarm (docs/trust.md).

    python benchmarks/witness_alarms.py [--minutes 60] [--strategies unicron unicron_fsdp] [--settings bf16 dropout ...]

Each strategy trains a small GPT with each of the settings, for an equal part of the minutes: three workers of
``unicron``, or two replicas of two workers of ``unicron_fsdp``. A row shows the finished steps, the micro-batches
(rows) whose gradients two ranks have compared, and the alarms. The run fails on an alarm, or if nothing was compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path

from unicron_lightning.local_cluster.cluster import LocalCluster

HERE = Path(__file__).resolve().parent
NODES = {"unicron": 3, "unicron_fsdp": 4}
SETTINGS = ("bf16", "dropout", "compiled", "checkpointed", "all")
END_SECONDS = 180.0


def measure(strategy: str, setting: str, seconds: float) -> str:
    """Return a row of the table.

    Raises:
        SystemExit: a worker has ended with an error, or nothing was compared.
    """
    nodes = NODES[strategy]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [HERE / "job_witness_alarms.py", strategy, setting, str(seconds), str(nodes), name]
        with LocalCluster(command, nodes=nodes, nnodes=f"{nodes}:{nodes}", folder=folder / "logs") as cluster:
            codes = cluster.wait_exit(seconds + END_SECONDS)
            logs = "".join(cluster.log(node) for node in codes)
        if any(codes.values()) or not (folder / "counts.json").exists():
            raise SystemExit(f"{strategy}, {setting}: a worker has failed:\n{logs[-4000:]}")
        counts = json.loads((folder / "counts.json").read_text())
    alarms = max(counts["alarms"], logs.count("gradients_differ"))
    if alarms or not counts["compared"]:
        raise SystemExit(f"{strategy}, {setting}: {alarms} alarms in {counts['compared']} comparisons\n{logs[-4000:]}")
    return f"| {strategy} | {setting} | {seconds / 60:.1f} | {counts['steps']} | {counts['compared']} | {alarms} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--strategies", nargs="+", choices=NODES, default=list(NODES))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options = parser.parse_args()
    cases = list(itertools.product(options.strategies, options.settings))
    print("| strategy | setting | minutes | steps | compared | alarms |\n|---|---|---|---|---|---|")
    for strategy, setting in cases:
        print(measure(strategy, setting, 60.0 * options.minutes / len(cases)), flush=True)


if __name__ == "__main__":
    main()
