"""Fault-tolerant training: Unicron's recovery for PyTorch Lightning and torchrun.

Importing this package makes ``Trainer(strategy="unicron")`` available (see `unicron_lightning.autoload`), imports
nothing outside the standard library and does nothing else. The public names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unicron_lightning.autoload import STRATEGIES, offer_strategy

if TYPE_CHECKING:
    from unicron_lightning.local_cluster.cluster import LocalCluster
    from unicron_lightning.loop.run import Run
    from unicron_lightning.strategies.fsdp.strategy import UnicronFSDPStrategy
    from unicron_lightning.strategies.megatron.strategy import UnicronMegatronStrategy
    from unicron_lightning.strategies.unicron import UnicronStrategy

__all__ = ["LocalCluster", "Run", "UnicronFSDPStrategy", "UnicronMegatronStrategy", "UnicronStrategy", "__version__"]

_MODULES = {
    "LocalCluster": "unicron_lightning.local_cluster.cluster",
    "Run": "unicron_lightning.loop.run",
} | {name: module for module, name, _ in STRATEGIES.values()}

offer_strategy()


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562)."""
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(_MODULES[name]), name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("unicron-lightning")
        except PackageNotFoundError:  # a checkout on the path that was not installed
            return "unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
