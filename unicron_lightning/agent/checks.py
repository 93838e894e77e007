"""Checks of the agent's machine and of its links to other machines.

**Health** is read at intervals, in a thread of its own; the coordinator judges the readings. Reading must not block the
agent: file systems and drivers can hang in the kernel. A first reading that does not arrive is itself reported as the
problem.

**GPUs** are read by NVIDIA's management library: ECC, Xid events, NVLink, throttling, temperature. Optional: without
the library's Python binding (the extra ``gpu``) or without a driver there are no readings. Counters are relative to the
agent's start. A call may block if the driver hangs: `Gpus` is used in a thread of its own.

**Probes** are connections to peers, ordered by the coordinator, which show whether this node reaches their nodes.
A peer is reached when the TCP connection is established: packets have gone both ways. Its kernel answers, whatever the
listening process does. Nothing is sent, and the connection is closed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

from unicron_lightning import wire

_EVENT_MILLISECONDS: Final = 0
_EVENTS: Final = 100
_SLOWED: Final = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
"""Bits of NVML's reasons for lower clocks that indicate a problem; power caps and idling do not."""


def visible_devices(listed: str | None, identities: Sequence[str]) -> list[int]:
    """Return the numbers of the devices that CUDA_VISIBLE_DEVICES lists; all if an entry names none of them.

    Args:
        listed: its value; None: it is not set.
        identities: of the machine's devices, in the order of the PCI bus, in which CUDA numbers devices of one kind.
    """
    found = []
    for entry in filter(None, map(str.strip, "" if listed is None else listed.split(","))):
        if entry == "-1":  # CUDA ignores what follows
            break
        numbered = [int(entry)] if entry.isdecimal() and int(entry) < len(identities) else []
        named = numbered or [at for at, identity in enumerate(identities) if identity.startswith(entry)]
        if len(named) != 1:
            return list(range(len(identities)))
        found += named
    return list(range(len(identities))) if listed is None else found


class Gpus:
    """The GPUs that this agent's workers may use; another task's are none of its concern.

    Args:
        library: NVML's Python binding, or a stand-in; None: the real one, if it is installed.
        listed: value of CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, library: Any = None, listed: str | None = None) -> None:
        self._listed = os.environ.get("CUDA_VISIBLE_DEVICES") if listed is None else listed
        self._nvml = _binding() if library is None else library
        self._handles: list[tuple[str, Any]] = []
        self._before: dict[tuple[str, str], int] = {}
        self._xids: dict[str, list[int]] = {}
        self._events: Any = None
        self.error = ""
        """Reason why the GPUs cannot be read despite a driver; "" if they can, or there is no driver."""
        if self._nvml is not None:
            self._open()

    def close(self) -> None:
        """Release the library."""
        if self._nvml is not None and self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                if self._events is not None:
                    self._nvml.nvmlEventSetFree(self._events)
                self._nvml.nvmlShutdown()
            self._handles = []

    def read(self) -> list[wire.GpuReading]:
        """Read all GPUs."""
        self._take_events()
        return [self._read(bus, handle) for bus, handle in self._handles]

    def _open(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            identities = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
            for handle in (handles[at] for at in visible_devices(self._listed, identities)):
                self._handles.append((_text(nvml.nvmlDeviceGetPciInfo(handle).busId), handle))
        except nvml.NVMLError_LibraryNotFound:
            return
        except nvml.NVMLError as error:
            self.error = f"{type(error).__name__}: {error}"
            return
        with contextlib.suppress(nvml.NVMLError):
            self._events = nvml.nvmlEventSetCreate()
            for _, handle in self._handles:
                with contextlib.suppress(nvml.NVMLError):
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    def _read(self, bus: str, handle: Any) -> wire.GpuReading:
        nvml, errors = self._nvml, []

        def ask(what: Callable[[], Any]) -> Any:
            try:
                return what()
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
                return None
            except nvml.NVMLError as error:
                errors.append(f"{type(error).__name__}: {error}")
                return None

        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        celsius = ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        ecc = ask(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))
        rows = ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
        reasons = ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
        links = sum(self._link(handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
        return wire.GpuReading(
            bus=bus,
            celsius=celsius,
            ecc_errors=self._since(bus, "ecc", ecc or 0),
            remap_failed=bool(rows and rows[3]),
            nvlink_errors=self._since(bus, "nvlink", links),
            xids=list(self._xids.get(bus, [])),
            throttled=[name for bit, name in _SLOWED.items() if reasons & bit],
            error=errors[0] if errors else "",
        )

    def _link(self, handle: Any, link: int) -> int:
        """Return the recoveries of a link; 0 if the link does not exist."""
        nvml = self._nvml
        try:
            return int(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, nvml.NVML_NVLINK_ERROR_DL_RECOVERY))
        except nvml.NVMLError:
            return 0

    def _since(self, bus: str, name: str, value: int) -> int:
        return max(0, value - self._before.setdefault((bus, name), value))

    def _take_events(self) -> None:
        nvml = self._nvml
        for _ in range(_EVENTS if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, _EVENT_MILLISECONDS)
                bus = _text(nvml.nvmlDeviceGetPciInfo(event.device).busId)
            except nvml.NVMLError:  # a time-out: no event is pending
                return
            xids = self._xids.setdefault(bus, [])
            if event.eventData not in xids:
                xids.append(int(event.eventData))


def _text(given: bytes | str) -> str:
    """Return a text of the library, whose versions differ in its type."""
    return given.decode() if isinstance(given, bytes) else given


def _binding() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


READ_SECONDS: Final = 15.0
FIRST_SECONDS: Final = 20.0
"""Seconds to wait for the first reading, which decides whether the agent may have workers."""


def read_host(root: Path = Path("/")) -> wire.NodeReading:
    """Read disks and memory. Unreadable values are left out."""
    disks = {}
    for path in dict.fromkeys((tempfile.gettempdir(), str(Path.cwd()))):
        with contextlib.suppress(OSError):
            state = os.statvfs(path)
            disks[path] = state.f_bavail * state.f_frsize
    memory = psutil.virtual_memory()
    pressure = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        full = next(line for line in (root / "proc/pressure/memory").read_text().splitlines() if line[:4] == "full")
        pressure = float(full.split("avg10=")[1].split()[0])
    return wire.NodeReading(
        disk_free_bytes=disks,
        memory_free_percent=100 * memory.available / memory.total if memory.total else None,
        memory_pressure_percent=pressure,
    )


class HealthWatch:
    """Health readings of one agent.

    Args:
        told: called in the watch's thread with each reading but the first.
        read: reads the host.
        gpus: creates the reader of the GPUs.
    """

    def __init__(
        self,
        told: Callable[[wire.NodeReading], None],
        read: Callable[[], wire.NodeReading] = read_host,
        gpus: Callable[[], Gpus] = Gpus,
    ) -> None:
        self._told = told
        self._read = read
        self._gpus = gpus
        self._closing = threading.Event()
        self._first: queue.SimpleQueue[wire.NodeReading] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="unicron-health", daemon=True)

    def start(self) -> wire.NodeReading:
        """Start reading; return the first reading, or a missing one after the time limit."""
        self._thread.start()
        try:
            return self._first.get(timeout=FIRST_SECONDS)
        except queue.Empty:
            return wire.NodeReading(missing=True)

    def close(self) -> None:
        """Stop; a thread that hangs in the kernel is left behind."""
        self._closing.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        gpus = self._gpus()
        began = time.monotonic()
        self._first.put(self._all(gpus))
        late = time.monotonic() - began > FIRST_SECONDS
        while late or not self._closing.wait(READ_SECONDS):
            late = False
            with contextlib.suppress(RuntimeError):  # the agent has ended meanwhile
                self._told(self._all(gpus))
        gpus.close()

    def _all(self, gpus: Gpus) -> wire.NodeReading:
        host = self._read()
        return wire.NodeReading(
            disk_free_bytes=host.disk_free_bytes,
            memory_free_percent=host.memory_free_percent,
            memory_pressure_percent=host.memory_pressure_percent,
            gpus=gpus.read(),
            gpu_error=gpus.error,
        )


_AT_ONCE: Final = 256
_MOST_CHARACTERS: Final = 200


class Prober:
    """The prober of one agent; lives in its event loop.

    Args:
        send: sends messages to the coordinator.
    """

    def __init__(self, send: Callable[[wire.Message], None]) -> None:
        self._send = send
        self._task: asyncio.Task[None] | None = None

    def begin(self, order: wire.Probe) -> None:
        """Start a probe; cancel an unfinished one."""
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self._probe(order))

    async def close(self) -> None:
        """Cancel a probe in progress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _probe(self, order: wire.Probe) -> None:
        room = asyncio.Semaphore(_AT_ONCE)
        causes = await asyncio.gather(*(_reach(peer, order.seconds, room) for peer in order.peers))
        missed = {peer.agent: cause for peer, cause in zip(order.peers, causes, strict=True) if cause}
        self._send(wire.Probed(number=order.number, missed=missed))


async def _reach(peer: wire.Peer, seconds: float, room: asyncio.Semaphore) -> str:
    """Return the reason why a peer is not reached; "" if it is."""
    loop = asyncio.get_running_loop()
    async with room:
        try:
            family, _, _, _, address = (await loop.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM))[0]
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.setblocking(False)
                return await _connect(connection, address, seconds)
        except OSError as error:
            return (os.strerror(error.errno) if error.errno and error.errno > 0 else str(error))[
                :_MOST_CHARACTERS
            ] or "unknown"


async def _connect(connection: socket.socket, address: tuple[object, ...], seconds: float) -> str:
    try:
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(connection, address), seconds)
    except asyncio.TimeoutError:
        # On a busy machine the connection may have stood in time, and this loop have been late to see it.
        try:
            connection.getpeername()
        except OSError:
            return f"{os.strerror(errno.ETIMEDOUT)} after {seconds:g} s"
    return ""
