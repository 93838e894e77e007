"""Measure where the time of a relayout goes: replicas of two shards become one of four, and again two of two.

    python benchmarks/relayout.py [--width 2048] [--layers 8] [--orders 4]

Four nodes of this machine have a worker of `unicron_fsdp` each, with layers x width^2 parameters in float32 and AdamW's
state. The figures, medians over the orders, are the time from the last step in the old layout to the first one in the
new, and its parts: until the checkpoint is reported, the last new process runs, it has imported all, the state is
restored, the training has begun there, and the step is made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEP_SECONDS = 0.2
PREPARE_SECONDS = 8.0
"""Time after which agents have prepared processes for the next workers."""
PATIENCE = 300.0


def trainer_of(strategy: Any, folder: Path) -> Any:
    """Return a trainer on four nodes."""
    import lightning.pytorch as pl

    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=4,
        max_steps=10**6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def work(folder: Path) -> None:
    """Train, in one worker."""
    log = (folder / f"notes-{os.getpid()}.jsonl").open("w", buffering=1)

    def note(what: str, **fields: Any) -> None:
        log.write(json.dumps({"what": what, "at": time.time(), **fields}) + "\n")

    note("start")
    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, TensorDataset

    from unicron_lightning import UnicronFSDPStrategy

    settings = json.loads((folder / "settings.json").read_text())
    width, layers = settings["width"], settings["layers"]
    torch.set_num_threads(1)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

        def configure_model(self) -> None:
            mesh: Any = self.device_mesh["data_parallel"]  # type: ignore[index]
            for layer in self.net:
                fully_shard(layer, mesh=mesh)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

        def on_train_start(self) -> None:
            note("begun")

        def on_train_batch_end(self, *_: Any) -> None:
            strategy: Any = self.trainer.strategy
            note("step", shards=strategy.fabric.shape.shards)
            time.sleep(STEP_SECONDS)
            self.trainer.should_stop = bool(strategy.broadcast((folder / "stop").exists(), 0))

    note("imported")
    trainer = trainer_of(UnicronFSDPStrategy(shard_size=2), folder)
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(4096, width)), batch_size=1))


def notes(folder: Path, what: str) -> list[dict[str, Any]]:
    """Return the workers' notes of a kind."""
    lines = [json.loads(line) for path in folder.glob("notes-*") for line in path.read_text().splitlines()]
    return [line for line in lines if line["what"] == what]


def relayout(cluster: Any, folder: Path, shards: int) -> dict[str, float]:
    """Order a number of shards; return the seconds of the relayout, and of its parts."""

    def steps(*, new: bool) -> list[float]:
        return [each["at"] for each in notes(folder, "step") if (each["shards"] == shards) == new]

    ordered = time.time()
    cluster.fetch("/v1/tasks/task/relayout", method="POST", shards=str(shards))
    cluster.until("the relayout", lambda: max(steps(new=True), default=0.0) > ordered, PATIENCE)
    cluster.wait_workers(4, PATIENCE)
    first = min(at for at in steps(new=True) if at > ordered)
    last = max(at for at in steps(new=False) if at < first)
    at = {event["name"]: event["at"] for event in cluster.events() if last < event["at"] < first}
    new = {what: max(e["at"] for e in notes(folder, what) if last < e["at"] < first) for what in ("start", "imported")}
    marks = {
        "checkpoint": at["layout_changes"],
        "processes": new["start"],
        "imports": new["imported"],
        "restored": at["worker.state_restored"],
        "begun": max(each["at"] for each in notes(folder, "begun") if last < each["at"] < first),
        "step": first,
    }
    before, found = last, {"pause": first - last}
    for name, mark in marks.items():
        found[name], before = mark - before, mark
    return {name: round(seconds, 2) for name, seconds in found.items()}


def measure(folder: Path, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Return the seconds of each relayout, and of its parts."""
    from unicron_lightning.local_cluster.cluster import LocalCluster

    (folder / "settings.json").write_text(json.dumps(vars(arguments)))
    found = []
    with LocalCluster([__file__, folder], nodes=4, nnodes="2:4", folder=folder) as cluster:
        cluster.wait_workers(4, PATIENCE)
        cluster.wait_step(3, PATIENCE)
        for number in range(arguments.orders):
            time.sleep(PREPARE_SECONDS)
            found.append(relayout(cluster, folder, 2 if number % 2 else 4))
            print(json.dumps(found[-1]), flush=True)
        (folder / "stop").touch()
        cluster.wait_exit(PATIENCE)
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("width", 2048), ("layers", 8), ("orders", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relayout-") as name:
        found = measure(Path(name), arguments)
    medians = {name: round(statistics.median(each[name] for each in found), 2) for name in found[0]}
    size = 12 * arguments.layers * arguments.width**2 / 1e6
    print(f"state {size:.0f} MB, load {os.getloadavg()[0]:.1f}: {json.dumps(medians)}")


if __name__ == "__main__":
    if len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
        work(Path(sys.argv[1]))
    else:
        main()
