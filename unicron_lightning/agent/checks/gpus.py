"""Readings of this machine's GPUs by NVIDIA's management library: ECC, Xid events, NVLink, throttling, temperature.

Optional: without the library's Python binding (the extra ``gpu``) or without a driver there are no readings. Counters
are relative to the agent's start. A call may block if the driver hangs: `Gpus` is used in a thread of its own.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, Final

from unicron_lightning import wire

_EVENT_MILLISECONDS: Final = 0
_EVENTS: Final = 100
_SLOWED: Final = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
"""Bits of NVML's reasons for lower clocks that indicate a problem; power caps and idling do not."""


class Gpus:
    """The GPUs of this machine.

    Args:
        library: NVML's Python binding, or a stand-in; None: the real one, if it is installed.
    """

    def __init__(self, library: Any = None) -> None:
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
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                bus = nvml.nvmlDeviceGetPciInfo(handle).busId
                self._handles.append((bus.decode() if isinstance(bus, bytes) else str(bus), handle))
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
                bus = nvml.nvmlDeviceGetPciInfo(event.device).busId
            except nvml.NVMLError:  # a time-out: no event is pending
                return
            xids = self._xids.setdefault(bus.decode() if isinstance(bus, bytes) else str(bus), [])
            if event.eventData not in xids:
                xids.append(int(event.eventData))


def _binding() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None
