"""Entry of Hydra's plugin search: the launcher's class and its configuration.

Every Hydra program on the machine imports this, so it imports nothing but Hydra and the schema; the rest is
`unicron_lightning.launcher`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from unicron_lightning.launcher.job import LauncherConfig

ConfigStore.instance().store(group="hydra/launcher", name="unicron", node=LauncherConfig, provider="unicron_lightning")


class UnicronLauncher(Launcher):
    """Runs the jobs of a sweep as tasks of one cluster. Arguments: the fields of `LauncherConfig`."""

    def __init__(self, **options: Any) -> None:
        self._options = LauncherConfig(**options)
        self._context: HydraContext | None = None
        self._config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from unicron_lightning.launcher.launch import launch

        assert self._context is not None
        assert self._config is not None
        return launch(self._options, self._context, self._config, job_overrides, initial_job_idx)
