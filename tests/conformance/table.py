"""The table of scenarios: functions that take a `Lab`, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from conformance.lab import Lab

PARTS: Final = (
    "loops",
    "checkpoints",
    "logged",
    "loggers",
    "optimizing",
    "data",
    "several",
    "reading",
    "callbacks",
    "runs",
    "failing",
    "tools",
    "interfaces",
    "trainers",
    "searches",
)
"""Modules with scenarios, in this folder."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One scenario.

    Attributes:
        run: gets a `Lab`.
        reference: strategy with which ``unicron`` is compared; ``auto`` is the one for a single device.
        needs: module that must be installed.
        alone: needs a world of one worker.
    """

    run: Callable[[Lab], None]
    reference: str = "auto"
    needs: str | None = None
    alone: bool = False


TABLE: dict[str, Scenario] = {}


def scenario(
    *, reference: str = "auto", needs: str | None = None, alone: bool = False, **cases: dict[str, Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function in the table, once, or for each case: its name and the arguments."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        part = function.__module__.rpartition(".")[2]
        for case, given in (cases or {"": {}}).items():
            name = f"{part}.{function.__name__}" + (f"[{case}]" if case else "")
            assert name not in TABLE, name

            def run(lab: Lab, given: dict[str, Any] = given) -> None:
                function(lab, **given)

            TABLE[name] = Scenario(run=run, reference=reference, needs=needs, alone=alone)
        return function

    return enter


def scenarios() -> dict[str, Scenario]:
    """Return all scenarios."""
    for part in PARTS:
        importlib.import_module(f"conformance.{part}")
    return dict(TABLE)
