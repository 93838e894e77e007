"""numba is loaded for large plans only; interpreted loops are equal; without a writable cache planning is uncached."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import numba
import pytest
from planner.situations import SHAPES, shaped

from unicron_lightning.planner.search import dynamic_program, exact
from unicron_lightning.planner.solver import PlanTable, solve


@pytest.mark.parametrize(
    "module", ["unicron_lightning", "unicron_lightning.cli", "unicron_lightning.planner", "unicron_lightning.autoload"]
)
def test_importing_the_package_does_not_load_numba(module: str) -> None:
    code = f"import sys, {module}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("module", ["torch", "lightning", "numba"])
def test_importing_the_planner_loads_neither_torch_nor_lightning_nor_numba(module: str) -> None:
    code = f"import sys, unicron_lightning.planner.solver; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


PLAN = """
import json, logging, sys
from unicron_lightning.planner.reward import Curve
from unicron_lightning.planner.solver import solve
from unicron_lightning.planner.state import ClusterState
from unicron_lightning.planner.reward import PlanTask

logging.basicConfig(stream=sys.stderr)
units = int(sys.argv[1])
if sys.argv[2] == "without":
    sys.modules["numba"] = None

class Saturating:
    def __init__(self, bend): self.bend = bend
    def throughput(self, num_workers): return 1e14 * num_workers / (1 + num_workers / self.bend)
    def configuration(self, num_workers): return None
    def uncertainty(self, num_workers): return 0.0

tasks = [PlanTask(name=f"t{n}", performance=Saturating(40.0 * (n + 1)), transition_seconds=60.0) for n in range(4)]
curves = tuple(Curve.of(task, 1, units) for task in tasks)
for _ in range(2):
    plan = solve(ClusterState(tasks=curves, num_workers=units, running_seconds=1e5))
print(json.dumps([plan.workers, bool(sys.modules.get("numba"))]))
"""


def plan(units: int, numba: str) -> tuple[list[int], bool, str]:
    """Workers per task, whether numba was loaded, and the log."""
    command = [sys.executable, "-c", PLAN, str(units), numba]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    workers, loaded = json.loads(done.stdout)
    return workers, loaded, done.stderr


def test_a_small_plan_does_not_load_numba() -> None:
    workers, loaded, _ = plan(128, "with")
    assert sum(workers) == 128 and not loaded


def test_a_large_plan_is_compiled_and_equal_without_numba_but_then_it_warns_once() -> None:
    workers, loaded, log = plan(2100, "with")
    assert loaded and "planning_is_interpreted" not in log
    slowly, loaded, log = plan(2100, "without")
    assert slowly == workers and not loaded
    assert log.count("planning_is_interpreted") == 1 and "unicron-lightning[plan]" in log


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def interpret() -> None:
        for module in (exact, dynamic_program):
            for name, function in list(vars(module).items()):
                if hasattr(function, "py_func"):
                    monkeypatch.setattr(module, name, function.py_func)

    return interpret


@pytest.mark.filterwarnings("error")
def test_interpreted_loops_give_the_same_plans(interpreted: Callable[[], None]) -> None:
    colds = [shaped(kind, tasks, 90, seed=seed) for kind in SHAPES for seed, tasks in ((1, 3), (2, 5), (3, 8))]
    cases = [after for cold in colds for after in (cold, cold.adopt(solve(cold).allocation))]
    compiled = [(solve(case), PlanTable.of(case).plans) for case in cases]
    interpreted()
    assert not hasattr(exact.keys_of, "py_func")
    for case, (alone, ahead) in zip(cases, compiled, strict=True):
        assert solve(case).workers == alone.workers
        assert {event: made.workers for event, made in PlanTable.of(case).plans.items()} == {
            event: made.workers for event, made in ahead.items()
        }


def double(number: int) -> int:
    return 2 * number


def test_without_a_place_for_the_cache_it_compiles_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    original = numba.njit

    def njit(*functions: object, cache: bool = False, nogil: bool = False) -> object:
        if cache:
            raise RuntimeError("cannot cache function 'double': no locator available for file 'x'")
        return original(*functions, nogil=nogil)

    monkeypatch.setattr(numba, "njit", njit)
    assert dynamic_program.machine_code(double)(21) == 42


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(**_: object) -> object:
        raise RuntimeError("something else")

    monkeypatch.setattr(numba, "njit", njit)
    with pytest.raises(RuntimeError, match="something else"):
        dynamic_program.machine_code(double)
