"""``import torch`` stays cheap and safe, and ``Trainer(strategy="unicron")`` needs no import of this package."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from importlib.metadata import entry_points

import pytest

from unicron_lightning import autoload

HEAVY = {"lightning", "aiohttp", "msgspec", "hydra", "omegaconf", "psutil", "rich", "unicron_lightning.strategies"}


def run_python(code: str, **environment: str) -> str:
    """Run ``code`` in a fresh interpreter, warnings as errors, and return what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def registry_module() -> types.ModuleType:
    """A stand-in for Lightning's strategies module, with an empty registry."""
    module = types.ModuleType(autoload.REGISTRY_MODULE)

    class Registry(dict[str, object]):
        def register(self, name: str, strategy: object, description: str, given: str) -> None:
            assert name not in self and name == given
            self[name] = strategy

    module.StrategyRegistry = Registry()  # type: ignore[attr-defined]
    return module


def test_entry_points_name_what_exists() -> None:
    (backend,) = entry_points(group="torch.backends", name="unicron_lightning")
    assert backend.load() is autoload.install
    (handler,) = entry_points(group="torchrun.handlers", name="unicron")
    assert handler.value == "unicron_lightning.agent.entry:get_creator"


def test_install_imports_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "import unicron_lightning.autoload as a; a.install()\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(*sorted(new - sys.stdlib_module_names))"
    )
    assert run_python(code) == "unicron_lightning"


def test_import_torch_loads_it_and_nothing_heavy() -> None:
    code = "import torch, sys; print('unicron_lightning.autoload' in sys.modules, *sorted(set(sys.modules) & set({})))"
    assert run_python(code.format(sorted(HEAVY - {"psutil"}))) == "True"


def test_torch_has_an_off_switch() -> None:
    code = "import torch, sys; print('unicron_lightning' in sys.modules)"
    assert run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False"


def test_lightning_knows_the_strategy_without_an_import() -> None:
    code = (
        "import lightning.pytorch, sys\n"
        "from lightning.pytorch.trainer.connectors.accelerator_connector import StrategyRegistry\n"
        "print('unicron' in StrategyRegistry, 'unicron_lightning.strategies' in sys.modules)"
    )
    assert run_python(code) == "True False"


@pytest.mark.parametrize(
    "imports",
    [
        "import unicron_lightning, lightning.pytorch",
        "import lightning.pytorch, unicron_lightning",
        "import unicron_lightning, lightning.pytorch; unicron_lightning.autoload.install()",
    ],
)
def test_explicit_import_works_in_any_order_with_the_entry_point_off(imports: str) -> None:
    code = f"{imports}\nfrom lightning.pytorch.strategies import StrategyRegistry as R; print('unicron' in R)"
    assert run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "True"


def test_registering_twice_is_harmless(registry_module: types.ModuleType) -> None:
    autoload.register_strategy(registry_module)
    autoload.register_strategy(registry_module)
    names = ("unicron", "unicron_megatron", "unicron_fsdp")
    assert registry_module.StrategyRegistry == dict.fromkeys(names, autoload.build_strategy)


def test_an_unknown_registry_is_reported_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    autoload.register_strategy(types.ModuleType(autoload.REGISTRY_MODULE))
    assert "strategy_not_registered" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("no"), OSError("no"), ImportError("no")])
def test_a_failing_tie_is_swallowed(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = types.ModuleType("unicron_lightning.parent_death")

    def tie_to_agent() -> None:
        raise error

    module.tie_to_agent = tie_to_agent  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unicron_lightning.parent_death", module)
    monkeypatch.setenv("UNICRON_AGENT_PID", "1")
    with caplog.at_level(logging.DEBUG, logger=autoload.__name__):
        autoload.install()
    assert "not_tied_to_agent" in caplog.text


def test_a_process_outside_a_task_is_not_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNICRON_AGENT_PID", raising=False)
    monkeypatch.setitem(sys.modules, "unicron_lightning.parent_death", None)  # importing it would raise
    autoload.install()


def test_the_finder_is_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, autoload.REGISTRY_MODULE, raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    autoload.offer_strategy()
    autoload.offer_strategy()
    assert sum(type(finder).__name__ == "_RegistryFinder" for finder in sys.meta_path) == 1


def test_points_of_lightning_and_torch_that_this_leans_on_exist() -> None:
    code = (
        "import inspect, torch, lightning.pytorch.strategies as s\n"
        "import torch.distributed.elastic.rendezvous.registry as r\n"
        "from lightning.pytorch.trainer.connectors import accelerator_connector as c\n"
        "assert c.StrategyRegistry is s.StrategyRegistry\n"
        "assert list(inspect.signature(s.StrategyRegistry.register).parameters)[:3]"
        " == ['name', 'strategy', 'description']\n"
        "assert 'torch.backends' in inspect.getsource(torch._import_device_backends)\n"
        "assert 'torchrun.handlers' in inspect.getsource(r)\n"
        "print('ok')"
    )
    assert run_python(code) == "ok"
