"""Megatron's optimizer with torch's interface, for Lightning and for learning-rate schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch.optim import Optimizer

from unicron_lightning.errors import ConfigError


class MegatronOptimizer(Optimizer):
    """Adapter whose parameter groups are those of Megatron's present optimizer.

    Args:
        current: returns Megatron's optimizer.
        update: steps it, after the closure.
    """

    def __init__(self, current: Callable[[], Any], update: Callable[[], None]) -> None:
        # Not the base class's: it would copy the groups, and wrap `step` in hooks that know other optimizers.
        self._current = current
        self._update = update
        self.defaults = {}
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}
        self._patch_step_function: Any = lambda: None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Megatron's own groups: it uses the values that a scheduler sets here."""
        groups: list[dict[str, Any]] = self._current().param_groups
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Empty: Megatron's state is moved and saved separately."""
        return {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients start from zero in each step, and Lightning calls this after the step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the step's operation, which is the closure, then the update."""
        loss = None if closure is None else closure()
        self._update()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, see `state`."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the state, see `state`."""

    def rates(self) -> list[dict[str, Any]]:
        """Return plain values of each group, such as its learning rate, for a worker that joins."""
        plain = (bool, int, float, str)
        return [{k: v for k, v in group.items() if isinstance(v, plain) or v is None} for group in self.param_groups]

    def set_rates(self, rates: list[dict[str, Any]]) -> None:
        """Restore the values of `rates`."""
        for group, values in zip(self.param_groups, rates, strict=False):  # a stage may lack a group
            group.update(values)


class SampleScheduler:
    """Megatron's `OptimizerParamScheduler` with the interface that Lightning expects of a scheduler.

    Megatron counts samples, so each optimizer step advances it by the samples of a global batch.

    Args:
        scheduler: Megatron's.
        samples: returns those of a global batch.
    """

    def __init__(self, scheduler: Any, samples: Callable[[], int]) -> None:
        self.scheduler, self.samples = scheduler, samples
        self.optimizer = scheduler.optimizer

    def step(self) -> None:
        """Advance by an optimizer step."""
        self.scheduler.step(increment=self.samples())

    def state_dict(self) -> dict[str, Any]:
        """Return Megatron's state, which is plain data."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; Megatron adds the stored number of samples to the present one."""
        self.scheduler.num_steps = 0
        self.scheduler.load_state_dict(state_dict)


def make_scheduler(
    factory: Callable[[Optimizer], Any] | None, optimizer: Optimizer, config: Any, samples: Callable[[], int]
) -> Any:
    """Return a module's scheduler in a form that Lightning takes; None without one.

    Args:
        factory: of `split_configuration`.
        optimizer: its argument.
        config: Megatron's `OptimizerConfig`, whose rates Megatron stores in the optimizer's groups.
        samples: returns those of a global batch.

    Raises:
        ConfigError: the configuration and the scheduler contradict each other, or without Megatron's scheduler
            nothing would use rates of the configuration.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    without = [group for group in optimizer.param_groups if group.get("min_lr", 0.0) is None]
    for group in without:
        group["min_lr"] = 0.0  # until the scheduler exists: it reads the groups in its constructor
    made = None if factory is None else factory(optimizer)
    options = dict(made) if isinstance(made, dict) else {}
    scheduler = options.get("scheduler", made)
    if not isinstance(scheduler, OptimizerParamScheduler):
        for name in _ONLY_MEGATRONS:
            if (value := getattr(config, name, None)) is not None:
                raise ConfigError(
                    f"OptimizerConfig({name}={value!r}) is used by megatron-core's OptimizerParamScheduler only; "
                    f"expected it as lr_scheduler, got {type(scheduler).__name__ if scheduler is not None else 'none'}"
                )
        for group in without:
            group["min_lr"] = None
        return made
    pairs = [("lr", "max_lr"), *([] if config.min_lr is None else [("min_lr", "min_lr")])]
    for field, name in pairs:
        if getattr(config, field) != getattr(scheduler, name):
            raise ConfigError(
                f"OptimizerConfig({field}={getattr(config, field)!r}) and OptimizerParamScheduler({name}="
                f"{getattr(scheduler, name)!r}): expected equal values"
            )
    config.min_lr = scheduler.min_lr
    for group in without:
        group["min_lr"] = scheduler.min_lr
    scheduler.step(0)
    return {"interval": "step", **options, "scheduler": SampleScheduler(scheduler, samples)}


_ONLY_MEGATRONS: Final = ("min_lr", "decoupled_lr", "decoupled_min_lr")
"""Rates that nothing but Megatron's scheduler reads."""


def split_configuration(returned: Any) -> tuple[Any, Callable[[Optimizer], Any] | None]:
    """Split the value of a module's ``configure_optimizers``: Megatron's configuration, and the scheduler's factory.

    Raises:
        ConfigError: the value has another form.
    """
    from megatron.core.optimizer import OptimizerConfig

    config, scheduler = returned, None
    if isinstance(returned, dict):
        config, scheduler = returned.get("optimizer"), returned.get("lr_scheduler")
    if not isinstance(config, OptimizerConfig) or not (scheduler is None or callable(scheduler)):
        raise ConfigError(
            f"configure_optimizers() returned {returned!r}; under unicron_megatron expected megatron-core's "
            'OptimizerConfig, or {"optimizer": OptimizerConfig, "lr_scheduler": function of the optimizer that returns '
            "what Lightning takes as lr_scheduler}"
        )
    return config, scheduler
