"""Problems of a node, by artificial readings; NVML by a fake library; the gate that excludes workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from coordinator.driver import World, members
from coordinator.severity.test_apply import joined

from unicron_lightning import wire
from unicron_lightning.agent import checks as watching
from unicron_lightning.agent.checks import Gpus, HealthWatch, read_host, visible_devices
from unicron_lightning.coordinator.severity.record import SEVERITY
from unicron_lightning.detection.health import HealthLimits, problems

WELL = wire.NodeReading(
    disk_free_bytes={"/tmp": 50 << 30},
    memory_free_percent=60.0,
    memory_pressure_percent=0.0,
    gpus=[wire.GpuReading(bus="0000:3B:00.0", celsius=55.0)],
)


def reading(**changes: Any) -> wire.NodeReading:
    return msgspec.structs.replace(WELL, **changes)


def gpu(**changes: Any) -> wire.NodeReading:
    return reading(gpus=[msgspec.structs.replace(WELL.gpus[0], **changes)])


@pytest.mark.parametrize(
    ("seen", "kind", "bars"),
    [
        (reading(disk_free_bytes={"/tmp": 1 << 20}), "node_degraded", True),
        (reading(memory_free_percent=0.5), "node_degraded", True),
        (reading(memory_pressure_percent=80.0), "node_degraded", False),
        (reading(missing=True), "node_degraded", True),
        (
            reading(gpu_error="NVMLError_LibRmVersionMismatch: Driver/library version mismatch"),
            "gpu_driver_error",
            True,
        ),
        (gpu(error="NVMLError_GpuIsLost: GPU is lost"), "gpu_driver_error", True),
        (gpu(ecc_errors=2), "ecc_error", True),
        (gpu(remap_failed=True), "ecc_error", True),
        (gpu(xids=[79]), "gpu_driver_error", True),
        (gpu(xids=[94]), "ecc_error", True),
        (gpu(xids=[74]), "nvlink_error", True),
        (gpu(xids=[31]), "node_degraded", False),
        (gpu(nvlink_errors=1), "nvlink_error", False),
        (gpu(throttled=["power brake"]), "node_degraded", False),
        (gpu(celsius=95.0), "node_degraded", False),
    ],
)
def test_a_bad_reading_is_a_problem(seen: wire.NodeReading, kind: str, bars: bool) -> None:
    (problem,) = problems(seen, HealthLimits())
    assert (problem.kind, problem.bars) == (kind, bars)
    assert problem.kind in SEVERITY
    assert msgspec.json.decode(wire.encode(seen), type=wire.NodeReading) == seen


def test_a_good_one_is_none_and_checks_can_be_switched_off() -> None:
    assert problems(WELL, HealthLimits()) == []
    assert problems(wire.NodeReading(), HealthLimits()) == []
    off = HealthLimits(disk_free=0, memory_free=0, memory_pressure=0, gpu_temperature=0, nvlink_errors=0)
    bad = reading(disk_free_bytes={"/": 0}, memory_free_percent=0.1, memory_pressure_percent=99.0)
    assert problems(bad, off) == problems(gpu(celsius=120.0, nvlink_errors=9), off) == []


def test_the_host_can_be_read_here() -> None:
    here = read_host()
    assert here.disk_free_bytes and all(free >= 0 for free in here.disk_free_bytes.values())
    assert here.memory_free_percent is not None and 0 < here.memory_free_percent <= 100


# ---- the gate


def test_a_node_that_is_not_well_gets_no_slot_until_it_is() -> None:
    world = World()
    world.nodes = (1, 4)
    agent = world.agent("a")
    agent.round, agent.waiting = 1, True
    agent.register(reading=reading(disk_free_bytes={"/tmp": 0}))
    assert agent.all(wire.Grant) == []
    assert agent.last(wire.Barred).reason == "0.00 GiB free in /tmp; expected 0.1"
    (told,) = [event.fields for event in world.events if event.name == "error_reported"]
    assert (told["kind"], told["node"], told["worker"]) == ("node_degraded", "node-a", None)
    for _ in range(3):
        agent.say(reading(disk_free_bytes={"/tmp": 1}))
    assert len(agent.all(wire.Barred)) == 1 and not agent.all(wire.Grant)
    agent.say(WELL)
    assert agent.last(wire.Barred).reason == ""
    assert len(agent.all(wire.Grant)) == 1
    assert [event.name for event in world.events].count("error_reported") == 1
    assert world.event("node_healthy").fields["checks"] == ["disk /tmp"]


def test_a_broken_gpu_costs_the_node_its_workers_and_a_hot_one_does_not() -> None:
    world, (a, b, c) = joined()
    a.say(gpu(celsius=99.0))
    assert len(members(world)) == 3
    b.say(gpu(ecc_errors=1))
    b.say(gpu(ecc_errors=1))
    assert world.machine.drained == ["node-b"]
    kinds = [event.fields["kind"] for event in world.events if event.name == "error_reported"]
    assert kinds == ["node_degraded", "ecc_error"]
    assert c.conn is not None


# ---- NVML


class NvmlError(Exception): ...


class NotSupported(NvmlError): ...


class Fake:
    """The used part of NVML's binding: one GPU, whose state tests change."""

    NVMLError, NVMLError_NotSupported, NVMLError_InvalidArgument = NvmlError, NotSupported, NotSupported
    NVMLError_LibraryNotFound = type("LibraryNotFound", (NvmlError,), {})
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU = 1, 0, 0
    NVML_NVLINK_MAX_LINKS, NVML_NVLINK_ERROR_DL_RECOVERY = 3, 1
    nvmlEventTypeXidCriticalError = 8  # noqa: N815 - NVML's name

    def __init__(self) -> None:
        self.celsius: Any = 50
        self.ecc, self.link, self.reasons, self.xids, self.open = 5, 7, 0, [], 0

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlEventSetWait_v2(self, *_: Any) -> Any:  # noqa: N802
        if not self.xids:
            raise NvmlError("Timeout")
        return SimpleNamespace(device="h", eventData=self.xids.pop())

    def nvmlDeviceGetTemperature(self, *_: Any) -> Any:  # noqa: N802
        if isinstance(self.celsius, Exception):
            raise self.celsius
        return self.celsius

    def nvmlDeviceGetRemappedRows(self, _: Any) -> Any:  # noqa: N802
        raise NotSupported

    def nvmlDeviceGetNvLinkErrorCounter(self, _: Any, link: int, __: Any) -> int:  # noqa: N802
        if link == 2:
            raise NotSupported
        return self.link

    def __getattr__(self, name: str) -> Any:
        values = {
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "h",
            "nvmlDeviceGetUUID": "GPU-5a",
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"0000:3B:00.0"),
            "nvmlDeviceGetTotalEccErrors": self.ecc,
            "nvmlDeviceGetCurrentClocksThrottleReasons": self.reasons,
            "nvmlEventSetCreate": "set",
            "nvmlDeviceRegisterEvents": None,
            "nvmlEventSetFree": None,
        }
        return lambda *_: values[name]


def test_nvml_is_read_as_of_the_agent_s_start() -> None:
    nvml = Fake()
    gpus = Gpus(nvml)
    assert gpus.read() == [wire.GpuReading(bus="0000:3B:00.0", celsius=50)]
    nvml.ecc, nvml.link, nvml.reasons, nvml.xids = 6, 9, 0x40 | 0x4, [79, 79]
    (now,) = gpus.read()
    assert (now.ecc_errors, now.nvlink_errors, now.throttled, now.xids) == (1, 4, ["hardware thermal"], [79])
    nvml.celsius = NvmlError("GPU is lost")
    assert gpus.read()[0].error == "NvmlError: GPU is lost"
    gpus.close()
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2, 0", [2, 0]),
        ("GPU-5b", [1]),
        ("0,-1,2", [0]),
        ("MIG-5b", [0, 1, 2]),
        ("7", [0, 1, 2]),
    ],
)
def test_devices_of_other_tasks_are_not_read(listed: str | None, found: list[int]) -> None:
    assert visible_devices(listed, ["GPU-5a", "GPU-5b", "GPU-6"]) == found


def test_an_agent_without_devices_reads_none() -> None:
    assert Gpus(Fake(), "").read() == []


def test_a_driver_that_does_not_answer_is_told_and_no_driver_is_none() -> None:
    nvml = Fake()
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(NvmlError("Driver/library version mismatch"))  # type: ignore[method-assign]
    assert Gpus(nvml).error == "NvmlError: Driver/library version mismatch"
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(Fake.NVMLError_LibraryNotFound())  # type: ignore[method-assign]
    assert (Gpus(nvml).error, Gpus(nvml).read()) == ("", [])


def test_the_real_library_has_what_is_asked_of_it() -> None:
    nvml = pytest.importorskip("pynvml")
    used = [name for name in dir(Fake) if name.lower().startswith("nvml")]
    used += ["nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo", "nvmlDeviceGetTotalEccErrors"]
    used += ["nvmlDeviceGetUUID"]
    used += ["nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlEventSetCreate", "nvmlDeviceRegisterEvents"]
    assert [name for name in used if not hasattr(nvml, name)] == []


def test_readings_come_from_a_thread_and_one_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "READ_SECONDS", 0.01)
    told: list[wire.NodeReading] = []
    watch = HealthWatch(told.append, lambda: WELL, lambda: Gpus(Fake()))
    first = watch.start()
    assert first.memory_free_percent == 60.0
    assert [each.bus for each in first.gpus] == ["0000:3B:00.0"]
    deadline = watching.time.monotonic() + 10
    while not told and watching.time.monotonic() < deadline:
        watching.time.sleep(0.01)
    watch.close()
    assert told[0] == first
    monkeypatch.setattr(watching, "FIRST_SECONDS", 0.05)
    hanging = HealthWatch(told.append, lambda: watching.time.sleep(0.5) or WELL, lambda: Gpus(Fake()))
    assert hanging.start().missing
    hanging.close()
