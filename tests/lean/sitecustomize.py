"""Makes processes that tests start leaner: a worker that starts, trains some steps and ends takes half the CPU time.

Its folder is on PYTHONPATH (`lean_processes` in tests/conftest.py), so Python imports it at the start of each process.

torchmetrics, and with it Lightning, imports matplotlib and scipy wherever they are installed; training uses neither, so
they are hidden. Nearly all objects of a process are those of imported modules, which the garbage collector would scan
again and again during the imports, and once more at the end. Whatever is created later is collected as usual.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

HIDDEN = frozenset() if os.environ.pop("UNICRON_TEST_FIGURES", None) else frozenset({"matplotlib", "scipy"})
IMPORTED = frozenset({"unicron_lightning.agent.handler", "unicron_lightning.worker.engine"})
"""Modules of agents and workers that import Lightning or torch before them."""
USUAL = gc.get_threshold()


class Hiding:
    """Reports that the packages of `HIDDEN` are not installed; a finder of ``sys.meta_path``."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname in HIDDEN:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        if fullname in IMPORTED:
            gc.freeze()
            gc.set_threshold(*USUAL)

    @staticmethod
    def find_distributions(context: Any) -> list[Any]:
        if context.name in HIDDEN:
            from importlib.metadata import PackageNotFoundError

            raise PackageNotFoundError(context.name)
        return []


sys.meta_path.insert(0, Hiding)
gc.set_threshold(100_000, 50, 100)
