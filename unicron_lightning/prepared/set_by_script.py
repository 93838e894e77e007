"""Which variables a worker's script sets before it imports torch and Lightning.

Libraries read some variables when they are imported, e.g. ``OMP_NUM_THREADS``. A forked worker would set them too late,
and nothing in it can know. An ordinary worker of the same script can: it compares its environment with that of its
start when torch has been imported, and again when the import of Lightning begins (`unicron_lightning.autoload`). The
agent has workers forked only after one has reported that it has set none (`wire.Imported`).
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Final

SET_BY_MODULES: Final = {
    b"PYTORCH_NVML_BASED_CUDA_CHECK": ("lightning.fabric", "lightning_fabric"),
    b"TORCHINDUCTOR_CACHE_DIR": ("torch._inductor",),
}
"""Variables that are set by the import of a module, with its name: not by the script, once the module is imported."""

_notes: Final[list[frozenset[str]]] = []


def note() -> None:
    """Note the variables that differ from those at the start of this process, a worker that was not forked."""
    before, now = _at_start(), _now()
    changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    usual = {name for name, modules in SET_BY_MODULES.items() if not sys.modules.keys().isdisjoint(modules)}
    _notes.append(frozenset(name.decode("ascii", "replace") for name in changed - usual))


def noted() -> frozenset[str] | None:
    """Return the names that were noted; None if nothing was: this process is no worker, or was forked."""
    return frozenset().union(*_notes) if _notes else None


def forget() -> None:
    """Drop the notes: what a forked worker's script sets is set after the imports."""
    _notes.clear()


def _at_start() -> dict[bytes, bytes]:
    return _parsed(Path("/proc/self/environ").read_bytes().split(b"\0"))


def _now() -> dict[bytes, bytes]:
    """Return the environment as libraries in C read it: `os.putenv` changes it and not `os.environ`."""
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: list[bytes] = []
    while (entry := entries[len(found)]) is not None:
        found.append(entry)
    return _parsed(found)


def _parsed(entries: list[bytes]) -> dict[bytes, bytes]:
    return {name: value for name, _, value in (entry.partition(b"=") for entry in entries) if name}
