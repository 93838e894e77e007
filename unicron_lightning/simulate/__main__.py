"""``python -m unicron_lightning.simulate [-m] [key=value ...]``: simulate the costs of failures, by policy.

Configured by Hydra; ``--cfg job`` shows the configuration, ``--help`` the groups. A wrong key or value ends the process
with one message (HYDRA_FULL_ERROR=1: with the full traceback).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unicron_lightning.coordinator.config import register_resolvers
from unicron_lightning.errors import UnicronError

_FULL_ERROR = "HYDRA_FULL_ERROR"
_WRONG = (UnicronError, HydraException, OmegaConfBaseException)
_NO_VARIANT = ("policy", "trace", "workload", "seed", "experiment", "output", "hydra")


def main(arguments: list[str] | None = None) -> None:
    """Run with the given command line (default: the process's)."""
    if arguments is not None:
        sys.argv = [sys.argv[0], *arguments]
    register_resolvers()
    where = "pkg://unicron_lightning.conf.simulate"
    run = hydra.main(version_base="1.3", config_path=where, config_name="simulate")(job)
    if os.environ.get(_FULL_ERROR) == "1":
        run()
        return
    # Hydra prints errors itself, and advises adding unknown keys with `+`; raised, they are reported in one line.
    os.environ[_FULL_ERROR] = "1"
    interrupt = _Interrupt()
    try:
        run()
    except BaseException as error:
        if _Interrupt.received:
            _end_interrupted()
        if not isinstance(error, _WRONG):
            raise
        _conclude()
        sys.exit(f"simulate: {_explain(error)}")
    finally:
        interrupt.restore()
        del os.environ[_FULL_ERROR]


class _Interrupt:
    """Remembers Ctrl-C, because what is raised in its place may be lost or replaced.

    Python drops a KeyboardInterrupt that is raised in a destructor or a callback of a library. OmegaConf, interrupted
    while it changes a value, raises an AttributeError as it restores its flags.
    """

    received = False

    def __init__(self) -> None:
        _Interrupt.received = False
        self._before = signal.signal(signal.SIGINT, self._receive)

    def restore(self) -> None:
        """Handle the signal as before."""
        signal.signal(signal.SIGINT, self._before)

    @staticmethod
    def _receive(*_: object) -> None:
        _Interrupt.received = True
        raise KeyboardInterrupt


def _end_interrupted() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process at once, without a traceback
    _conclude()
    sys.stderr.write("simulate: interrupted\n")
    sys.exit(130)


def _conclude() -> None:
    """Summarize what a sweep has finished before it ended early."""
    from unicron_lightning.simulate.output import SweepSummary

    if SweepSummary.running is not None:
        SweepSummary.running.end()


def job(composed: DictConfig) -> float:
    """Run one simulation, as Hydra has composed it.

    Returns:
        Accumulated WAF as a fraction of the ideal.
    """
    if _Interrupt.received:
        raise KeyboardInterrupt
    register_resolvers()  # in each process of a sweep
    # Computing modules are imported only here, so that --cfg and --help are quick.
    from unicron_lightning.simulate.output import as_table, console, row_of, save_result
    from unicron_lightning.simulate.settings import read_settings

    data = cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))
    settings = read_settings(data)
    cluster, _, trace = settings.scene()
    result = settings.run()
    around = HydraConfig.get()
    row = row_of(
        result,
        workload=settings.workload.name,
        seed=settings.seed,
        variant=variant_of(list(around.overrides.task)),
        num_workers=cluster.num_workers,
        num_faults=len(trace.faults),
    )
    folder = Path(around.runtime.output_dir)
    save_result(folder, result, row, settings.output.format)
    if around.mode is None or around.mode.name == "RUN":
        size = f"{cluster.num_workers} workers, {row['days']:g} days, {len(trace.faults)} faults"
        shown = console()
        shown.print(as_table([row], size, settings.output.columns))
        shown.print(f"in {folder}")
    return result.of_ideal


def variant_of(overrides: list[str]) -> str:
    """Return the overrides that distinguish a run, other than policy, trace, workload and seed."""
    return " ".join(sorted(each for each in overrides if _sets_apart(each.lstrip("+~").partition("=")[0])))


def _sets_apart(key: str) -> bool:
    # Changed numbers of a trace or a workload do; the choice of one has its own column.
    return key.partition(".")[0] not in _NO_VARIANT or key.startswith(("trace.", "workload."))


def _explain(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            return f"{cause.full_key}: {str(cause.msg or cause).splitlines()[0]}"
        cause = cause.__cause__
    return str(error)


if __name__ == "__main__":
    main()
