"""Simulations defined in code instead of on a command line: settings composed by Hydra, with figures moved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from unicron_lightning.coordinator.config import register_resolvers
from unicron_lightning.errors import ConfigError
from unicron_lightning.simulate.costs import COMMON, Calibration
from unicron_lightning.simulate.output import WafCurve, row_of
from unicron_lightning.simulate.settings import Settings, read_settings


@dataclass(frozen=True, kw_only=True)
class SimulationCase:
    """One simulation.

    Attributes:
        policy, seed: as in the configuration.
        overrides: overrides of Hydra.
        variant: its name in tables.
        moves: changed figures, by key.
    """

    policy: str
    seed: int
    overrides: tuple[str, ...] = ()
    variant: str = ""
    moves: tuple[tuple[str, float], ...] = ()


@lru_cache(maxsize=16)
def composed(overrides: tuple[str, ...]) -> Settings:
    """Compose settings with Hydra's overrides."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    register_resolvers()
    with initialize_config_module("unicron_lightning.conf.simulate", version_base="1.3"):
        data = OmegaConf.to_container(compose("simulate", overrides=list(overrides)), resolve=True)
    assert isinstance(data, dict)
    return read_settings({str(key): value for key, value in data.items()})


def moved(calibration: Calibration, key: str, value: float) -> Calibration:
    """Return the calibration with one figure at another value; for sweeps.

    Args:
        calibration: the original.
        key: as in `Calibration.figures`.
        value: the new value.

    Raises:
        ConfigError: no such figure.
    """
    found = dict(calibration.figures())
    if key not in found:
        raise ConfigError(f"costs.{key}: no such figure: expected one of {', '.join(found)}")
    old = found[key]
    new = replace(old, value=value, least=min(value, old.range[0]), most=max(value, old.range[1]))
    system, _, rest = key.partition(".")
    if system == COMMON:
        return replace(calibration, common={**calibration.common, rest: new})
    figures = calibration.systems[system]
    group, _, name = rest.partition(".")
    change: dict[str, Any] = {group: {**getattr(figures, group), name: new}} if name else {group: new}
    systems = {**calibration.systems, system: replace(figures, **change)}
    return replace(calibration, systems=systems)


def run(case: SimulationCase) -> WafCurve:
    """Simulate a case."""
    settings = composed(case.overrides)
    costs = settings.costs
    for key, value in case.moves:
        costs = moved(costs, key, value)
    settings = replace(settings, policy=case.policy, seed=case.seed, costs=costs)
    cluster, _, trace = settings.scene()
    result = settings.run()
    row = row_of(
        result,
        workload=settings.workload.name,
        seed=case.seed,
        variant=case.variant,
        num_workers=cluster.num_workers,
        num_faults=len(trace.faults),
    )
    return WafCurve(row=row, seconds=result.times, waf=result.values)


def cases_of(
    policies: Iterable[str], seeds: int, *overrides: str, variant: str = "", moves: tuple[tuple[str, float], ...] = ()
) -> list[SimulationCase]:
    """Create cases of policies and seeds that are otherwise equal."""
    return [
        SimulationCase(policy=policy, seed=seed, overrides=overrides, variant=variant, moves=moves)
        for policy in policies
        for seed in range(seeds)
    ]


def at_their_best(costs: Calibration) -> tuple[tuple[str, float], ...]:
    """Set every figure of all other systems to its minimum, their best case; Unicron's and common ones stay."""
    found = []
    for key, figure in costs.figures():
        if key.partition(".")[0] not in ("unicron", "common"):
            found.append((key, figure.range[0]))
    return tuple(found)


def at_our_worst(costs: Calibration) -> tuple[tuple[str, float], ...]:
    """Set every figure of Unicron, and the common ones, to its maximum."""
    return tuple(
        (key, figure.range[1]) for key, figure in costs.figures() if key.partition(".")[0] in ("unicron", "common")
    )


def for_nothing(costs: Calibration) -> tuple[tuple[str, float], ...]:
    """Reduce Unicron's costs to nearly nothing, so that only absent nodes matter. Checkpoint intervals stay."""
    return tuple(
        (key, 0.001)
        for key, _ in costs.figures()
        if key.startswith(("unicron.detection.", "unicron.change.", "common."))
    )


def swings(costs: Calibration) -> list[tuple[str, float, float]]:
    """List figures with a range: key, minimum, maximum."""
    return [(key, *figure.range) for key, figure in costs.figures() if figure.range[0] < figure.range[1]]
