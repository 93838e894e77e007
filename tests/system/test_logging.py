"""What is logged survives the rank that logs, and a worker that returns sees the metrics that the others see."""

from __future__ import annotations

import csv
import json
import os
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from system.cluster import Cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).parent / "logging_worker.py"


WRITER = '''
import json, os
class SummaryWriter:
    """Writes scalars as lines, into a file of its process as tensorboardX does."""
    def __init__(self, log_dir, **settings):
        os.makedirs(log_dir, exist_ok=True)
        self.path = os.path.join(log_dir, f"events.{os.getpid()}")
    def add_scalar(self, name, value, step):
        with open(self.path, "a") as file:
            file.write(json.dumps([name, float(value), step]) + "\\n")
    def flush(self): pass
    close = flush
'''


def run(folder: Path, logger: str, **variables: str) -> int:
    """Train with a logger of `logging_worker` until two first ranks, or all, have died; return the number of steps."""
    (folder / "logger").write_text(logger)
    with Cluster(folder, agents=2, nodes="1:2", script=SCRIPT, variables=lambda node: variables) as cluster:
        cluster.wait_end(240)
        assert len(cluster.events("task_restarts")) == (folder / "all").exists()
        if logger.startswith("csv"):
            assert "will be deleted" not in "".join(cluster.log(node) for node in cluster.agents)
    steps = {int((folder / f"end-{rank}").read_text()) for rank in range(2)}
    assert len(steps) == 1 and (folder / "killed-1").exists()
    if logger in ("wandb", "mlflow"):
        return steps.pop()
    assert [path.name for path in (folder / "logs/lightning_logs").iterdir()] == ["version_0"]
    return steps.pop()


@pytest.mark.parametrize("logger", [pytest.param("csv", marks=pytest.mark.chaos), "csv_version"])
def test_no_row_is_lost_with_the_first_rank(logger: str, tmp_path: Path) -> None:
    steps = run(tmp_path, logger)
    with (tmp_path / "logs/lightning_logs/version_0/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["loss_step"]] == list(range(steps))
    epochs = {int(row["epoch"]): float(row["loss_epoch"]) for row in rows if row["loss_epoch"]}
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert len(seen) > len(epochs)
    for each in seen:
        assert abs(each["loss"] - epochs[each["epoch"] - 1]) < 1e-6, each


def test_a_first_rank_of_torchrun_that_joins_late_begins_no_new_run(tmp_path: Path) -> None:
    (tmp_path / "late").touch()
    steps = run(tmp_path, "csv")
    with (tmp_path / "logs/lightning_logs/version_0/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["loss_step"]] == list(range(steps))


def packages(folder: Path) -> str:
    """A path with a writer that stands for tensorboardX's, which Lightning's logger looks for by name."""
    package = folder / "packages"
    about = package / "tensorboardX-2.6.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorboardX\nVersion: 2.6\n")
    (package / "tensorboardX").mkdir()
    (package / "tensorboardX/__init__.py").write_text(WRITER)
    (package / "tensorboardX/summary.py").write_text("hparams = lambda *about: []\n")
    return os.pathsep.join([str(package), os.environ["PYTHONPATH"]])


@pytest.mark.parametrize("all_die", [False, True])
def test_tensorboard_goes_on_in_the_same_folder(all_die: bool, tmp_path: Path) -> None:
    if all_die:
        (tmp_path / "all").touch()
    steps = run(tmp_path, "tensorboard", PYTHONPATH=packages(tmp_path))
    files = list((tmp_path / "logs/lightning_logs/version_0").glob("events.*"))
    assert len(files) >= 2, "the first ranks of the runs before and after the deaths"
    written = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    losses: dict[int, set[float]] = {}
    for name, value, step in written:
        if name == "loss_step":
            losses.setdefault(step, set()).add(round(value, 6))
    assert sorted(losses) == list(range(steps))
    assert all(len(values) == 1 for values in losses.values()), "a row that is there twice has the same value"


def test_a_resumed_task_keeps_the_rows_of_a_chosen_version(tmp_path: Path) -> None:
    """No worker survives; the steps since the checkpoint are repeated, and so are their rows."""
    with Cluster(tmp_path, agents=1, nodes="1", script=SCRIPT.with_name("resumed_logging.py")) as cluster:
        cluster.wait_end()
        (restart,) = cluster.events("task_restarts")
        assert restart["step"] == 12
    with (tmp_path / "logs/version_0/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["loss"]] == list(range(24))


def records(path: Path) -> Iterator[bytes]:
    """Records of a file of W&B: LevelDB's format of logs, after a header of 7 bytes; a torn end is left out."""
    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4) and place <= len(data):
            yield parts
            parts = b""


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed: pip install wandb")
@pytest.mark.parametrize("all_die", [False, True])
def test_wandb_goes_on_in_the_same_run(all_die: bool, tmp_path: Path) -> None:
    """Offline: each rank 0 writes a file of the same run; together they have all steps."""
    if all_die:
        (tmp_path / "all").touch()
    from wandb.proto.wandb_internal_pb2 import Record

    often = {"WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.2"}  # 15 s by default, and more than the kept rows
    steps = run(tmp_path, "wandb", WANDB_SILENT="true", WANDB_MODE="offline", **often)
    files = sorted((tmp_path / "logs").glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == (2 if all_die else 3), "two first ranks have died, or one life has ended"
    assert len({path.stem for path in files}) == 1, "one run"
    losses: dict[int, set[float]] = {}
    for path in files:
        for data in records(path):
            record = Record()
            record.ParseFromString(data)
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "loss_step" in row:
                losses.setdefault(int(row["trainer/global_step"]), set()).add(round(float(row["loss_step"]), 6))
    assert sorted(losses) == list(range(steps))
    assert all(len(values) == 1 for values in losses.values()), "a row that is there twice has the same value"


@pytest.mark.skipif(find_spec("mlflow") is None, reason="MLflow is not installed: pip install mlflow-skinny")
@pytest.mark.parametrize("all_die", [False, True])
def test_mlflow_goes_on_in_the_same_run(all_die: bool, tmp_path: Path) -> None:
    if all_die:
        (tmp_path / "all").touch()
    steps = run(tmp_path, "mlflow", MLFLOW_ALLOW_FILE_STORE="true")
    (path,) = (tmp_path / "logs/mlruns").glob("*/*/metrics/loss_step")
    rows = [line.split() for line in path.read_text().splitlines()]
    losses: dict[int, set[float]] = {}
    for _, value, step, *_ in rows:
        losses.setdefault(int(step), set()).add(round(float(value), 6))
    assert sorted(losses) == list(range(steps))
    assert all(len(values) == 1 for values in losses.values())


def test_a_worker_that_begins_while_the_first_one_opens_its_folder_has_no_folder_of_its_own(tmp_path: Path) -> None:
    with Cluster(tmp_path, agents=3, nodes="1:3", script=SCRIPT.with_name("spread.py")) as cluster:
        assert set(cluster.wait_exit(200).values()) == {0}
        first = tmp_path / "out" / "lightning_logs" / "version_0"
        assert {Path(path.read_text()) for path in tmp_path.glob("dirpath-*")} == {first / "checkpoints"}
        assert [path.name for path in first.parent.iterdir()] == ["version_0"]
        assert not any("dirpath has changed" in path.read_text() for path in tmp_path.glob("agent-*.log"))
