"""Hooks for every process that imports torch where this package is installed.

The entry point group ``torch.backends`` names `install`. Therefore ``Trainer(strategy="unicron")`` works in a script
that never imports this package, and a worker dies with its agent from its first lines on. Importing
`unicron_lightning` registers the strategy as well, for checkouts that are not installed and for
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``, torch's own switch, which disables the entry point.

Guarantees: nothing is ever raised into ``import torch``; no module outside the standard library is imported before
Lightning is; the cost is well below a millisecond (``benchmarks/import_cost.py`` measures it).

wrapt's post-import hooks would do the same, but importing wrapt alone takes about 3 ms.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_PACKAGE = "unicron_lightning.strategies"
STRATEGIES = {
    "unicron": (f"{_PACKAGE}.unicron", "UnicronStrategy", "Trains straight through failures (Unicron)"),
    "unicron_megatron": (f"{_PACKAGE}.megatron.strategy", "UnicronMegatronStrategy", "Megatron-core under Unicron"),
    "unicron_fsdp": (f"{_PACKAGE}.fsdp.strategy", "UnicronFSDPStrategy", "FSDP2 straight through failures"),
}
"""Module, class and description of each strategy, by the name for ``Trainer(strategy=...)``."""
REGISTRY_MODULE = "lightning.pytorch.strategies"
"""Module with Lightning's ``StrategyRegistry``, which is complete once this module has been executed."""
LIGHTNING = ("lightning", "pytorch_lightning")
"""Packages whose import reads variables."""
OTHER_REGISTRY_MODULE = "pytorch_lightning.strategies"
"""The same of the package ``pytorch_lightning``, in which the strategy is refused; see `strategies.lightning_root`."""

SEED_LOGGER = "lightning.fabric.utilities.seed"
"""Lightning's logger that announces the seed on every rank; one worker of a task is enough."""

logger = logging.getLogger(__name__)


def install() -> None:
    """Entry point: tie a worker to its agent, report its exceptions, and wait for Lightning. Never raises."""
    try:
        if os.environ.get("UNICRON_AGENT_PID"):
            from unicron_lightning.parent_death import tie_to_agent

            if tie_to_agent():
                from unicron_lightning.detection.reporting import watch_exceptions
                from unicron_lightning.prepared import set_by_script

                watch_exceptions()
                if sys.orig_argv[1:2] == ["-u"]:  # torchrun's command of a script, which could have been forked
                    set_by_script.note()
                if os.environ.get("RANK", "0") != "0":
                    logging.getLogger(SEED_LOGGER).addFilter(_is_no_seed)
    except Exception:  # supervisor boundary: any exception here would break `import torch`
        logger.debug("not_tied_to_agent", exc_info=True)
    offer_strategy()


def _is_no_seed(record: logging.LogRecord) -> bool:
    return "Seed set to" not in record.getMessage()


def offer_strategy() -> None:
    """Register the strategy with Lightning, now or as soon as Lightning is imported. Idempotent, never raises."""
    try:
        for name, register in _REGISTERS.items():
            if name in sys.modules:
                register(sys.modules[name])
        if not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _RegistryFinder())
    except Exception:  # supervisor boundary: runs inside `import torch`
        logger.debug("strategy_hook_failed", exc_info=True)


def register_strategy(module: ModuleType) -> None:
    """Add ``unicron``, ``unicron_megatron`` and ``unicron_fsdp`` to Lightning's registry, unless they are present.

    Args:
        module: `REGISTRY_MODULE`, executed.
    """
    try:
        for name, (_, _, description) in STRATEGIES.items():
            if name not in module.StrategyRegistry:
                module.StrategyRegistry.register(name, build_strategy, description=description, given=name)
    except Exception as error:  # noqa: BLE001 - supervisor boundary: runs inside `import lightning`
        logger.warning("strategy_not_registered name=%s error=%r", next(iter(STRATEGIES)), error)


def register_refusal(module: ModuleType) -> None:
    """Have the strategy's names, and its instances, refused by trainers of the package ``pytorch_lightning``.

    Args:
        module: `OTHER_REGISTRY_MODULE`, executed.
    """
    try:
        for name in STRATEGIES:
            if name not in module.StrategyRegistry:
                module.StrategyRegistry.register(name, build_refusal, description="Refused: see the error", given=name)
        if (made := sys.modules.get("unicron_lightning.strategies.fault_tolerant")) is not None:
            module.Strategy.register(made.FaultTolerantStrategy)
    except Exception as error:  # noqa: BLE001 - supervisor boundary: runs inside `import pytorch_lightning`
        logger.debug("refusal_not_registered error=%r", error)


def build_refusal(*, given: str, **init_params: Any) -> Any:  # noqa: ARG001 - called with the strategy's settings
    """Raise the error that names the cause; ``given`` is the strategy's name."""
    from unicron_lightning.strategies.lightning_root import refuse_strategy

    refuse_strategy(given)


_REGISTERS = {REGISTRY_MODULE: register_strategy, OTHER_REGISTRY_MODULE: register_refusal}


def build_strategy(*, given: str, **init_params: Any) -> Any:
    """Make a strategy; its module is imported only here, so that other users of Lightning have no cost.

    Args:
        given: its name in `STRATEGIES`.
        init_params: its settings.
    """
    from importlib import import_module

    module, name, _ = STRATEGIES[given]
    return getattr(import_module(module), name)(**init_params)


class _RegistryFinder:
    """Registers the strategy right after a module of `_REGISTERS` has been executed; ignores all modules but these and
    `LIGHTNING`.

    It stays on ``sys.meta_path`` (two comparisons per import): removing it while another thread iterates over the
    list would make that thread skip a finder.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec, with a loader that calls back."""
        if fullname in LIGHTNING:
            _note_variables()
        if fullname not in _REGISTERS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                _call_after_execution(spec, _REGISTERS[fullname])
                return spec
        return None


def _note_variables() -> None:
    """Note what a worker's script has set between its imports of torch and Lightning."""
    module = sys.modules.get("unicron_lightning.prepared.set_by_script")
    try:
        if module is not None and module.noted() is not None:
            module.note()
    except Exception:  # supervisor boundary: runs inside `import lightning`
        logger.debug("variables_not_noted", exc_info=True)


def _call_after_execution(spec: ModuleSpec, register: Callable[[ModuleType], None]) -> None:
    """Shadow ``exec_module`` on the loader's instance; its type and all other attributes are unchanged."""
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        register(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]
