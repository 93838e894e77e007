"""numba is loaded only for planning; without a writable cache planning works uncached."""

from __future__ import annotations

import subprocess
import sys

import numba
import pytest

from unicron_lightning.planner.search import kernels


@pytest.mark.parametrize(
    "module", ["unicron_lightning", "unicron_lightning.cli", "unicron_lightning.planner", "unicron_lightning.autoload"]
)
def test_importing_the_package_does_not_load_numba(module: str) -> None:
    code = f"import sys, {module}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("module", ["torch", "lightning"])
def test_planning_needs_neither_torch_nor_lightning(module: str) -> None:
    code = (
        "import sys, unicron_lightning.planner.table, unicron_lightning.planner.explanation\n"
        f"sys.exit({module!r} in sys.modules or 'numba' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def double(number: int) -> int:
    return 2 * number


def test_without_a_place_for_the_cache_it_compiles_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    original = numba.njit

    def njit(*functions: object, cache: bool = False) -> object:
        if cache:
            raise RuntimeError("cannot cache function 'double': no locator available for file 'x'")
        return original(*functions)

    monkeypatch.setattr(numba, "njit", njit)
    assert kernels.compiled(double)(21) == 42


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(**_: object) -> object:
        raise RuntimeError("something else")

    monkeypatch.setattr(numba, "njit", njit)
    with pytest.raises(RuntimeError, match="something else"):
        kernels.compiled(double)
