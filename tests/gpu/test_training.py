"""The strategy on a GPU: deaths at every place of a step, precisions, full memory, an error of the device.

Four agents with one worker each share the GPU. The reference is the same script in a world of one on the same GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu import kit
from system.cluster import SETTINGS, Cluster
from system.judge import Reference, check_exact
from system.test_worker_faults import check_schedule, groups

pytestmark = [pytest.mark.timeout(540)]

WORKERS = 4
WHOLE = {"world": WORKERS}
KILLS = [
    {**group, **WHOLE}
    for group in groups(
        "kill rank=1 micro_batch=0",
        "kill rank=0 point=training_step micro_batch=1",  # the last backward, in which reductions start
        "kill rank=2 bucket=0",
        "kill rank=3 phase=reduced",
        "kill rank=0 phase=commit",
    )
]
DURING_RECOVERY = [
    {**group, **WHOLE}
    for group in groups(
        ["kill rank=1 micro_batch=0", "kill rank=0 phase=connect"],
        ["kill rank=2 micro_batch=0", "kill rank=-1 joiner=yes phase=join"],
    )
]
Record = Callable[[str, Any], None]


def on_device(**different: Any) -> dict[str, Any]:
    """Settings of a run on the kit's device."""
    accelerator = "gpu" if kit.device() == "cuda" else "cpu"
    settled = {"nodes": WORKERS, "accumulation": 2, "full": WORKERS, "dtype": "float32", "accelerator": accelerator}
    return {**SETTINGS, **settled, **different}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[dict[str, Any]], Reference]]:
    """Give the failure-free run of settings, made once."""
    made: dict[str, Reference] = {}

    def reference(settings: dict[str, Any]) -> Reference:
        alone = {**settings, "fill": 0.0, "assert_at": None}
        key = repr(sorted(alone.items(), key=lambda item: item[0]))
        if key not in made:
            made[key] = Reference(tmp_path_factory.mktemp("reference"), alone, 40)
        return made[key]

    return reference


def heals(folder: Path, schedule: list[dict[str, Any]], settings: dict[str, Any], reference: Reference) -> Any:
    """Run a schedule to its end and compare; returns the differences."""
    with Cluster(
        folder,
        agents=WORKERS,
        nodes=f"1:{WORKERS}",
        schedule=schedule,
        settings=settings,
        variables=lambda node: kit.environment(node),
    ) as cluster:
        cluster.finish(480)
        check_schedule(cluster, schedule)
        return check_exact(folder, reference, workers=WORKERS)


@pytest.mark.gpu("K7")
def test_kills_in_a_step(tmp_path: Path, references: Any, record_property: Record) -> None:
    settings = on_device()
    record_property("differences", heals(tmp_path, KILLS, settings, references(settings)))


@pytest.mark.gpu("K8")
@pytest.mark.hardware
@pytest.mark.parametrize(
    "different",
    [
        pytest.param({"precision": "bf16-mixed", "fused": True}, id="bf16_fused"),
        pytest.param({"precision": "16-mixed"}, id="fp16_scaler"),
        pytest.param({"compile": True}, id="compiled"),
    ],
)
def test_kills_in_other_precisions(
    different: dict[str, Any], tmp_path: Path, references: Any, record_property: Record, request: pytest.FixtureRequest
) -> None:
    if "compile" in different:
        request.getfixturevalue("with_compiler")
    settings = on_device(**different)
    record_property("differences", heals(tmp_path, KILLS[::2], settings, references(settings)))


@pytest.mark.gpu("K9")
def test_kills_during_recoveries_with_full_memory(tmp_path: Path, references: Any, record_property: Record) -> None:
    filled = 0.9 / WORKERS if kit.device() == "cuda" else 0.0
    settings = on_device(fill=filled)
    record_property("differences", heals(tmp_path, DURING_RECOVERY, settings, references(settings)))


@pytest.mark.gpu("K12")
@pytest.mark.hardware
def test_an_assertion_of_the_device_ends_one_worker(tmp_path: Path, references: Any, record_property: Record) -> None:
    settings = on_device(assert_at=[1, 12])
    reference = references(settings)
    with Cluster(
        tmp_path,
        agents=WORKERS,
        nodes=f"1:{WORKERS}",
        settings=settings,
        variables=lambda node: kit.environment(node),
    ) as cluster:
        cluster.watch(lambda: len(cluster.events("worker_died")) >= 1, "the worker's end", 300)
        cluster.finish(300)
        died = cluster.events("worker_died")
        record_property("died", [event.get("kind") for event in died])
        assert len(died) == 1
        record_property("differences", check_exact(tmp_path, reference, workers=WORKERS))
