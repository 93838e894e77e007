"""Kind, cause and phase of the step, derived from an exception."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from unicron_lightning.detection.health import UNKNOWN, classify
from unicron_lightning.errors import ConfigError, GradientsDiffer, ProgramsDiffer, SilentCorruption

_OWN_KINDS: Final = (
    (ConfigError, "config_error"),
    (ProgramsDiffer, "programs_differ"),
    (SilentCorruption, "silent_data_corruption"),
    (GradientsDiffer, "gradients_differ"),
)
"""Kinds of this package's own errors."""

_CAUSE_CHARACTERS: Final = 500
_MESSAGE_CHARACTERS: Final = 4000
_FRAMES: Final = 12
_CHAIN: Final = 8

PHASES: Final = (
    # part of the file's path, function ("" for any), phase; the innermost matching frame counts
    ("unicron_lightning/data/fetch.py", "", "data"),
    ("torch/utils/data/", "", "data"),
    ("strategies/fault_tolerant.py", "to_device", "data"),
    ("strategies/micro_batch.py", "run", "compute"),
    ("unicron_lightning/worker/step.py", "_compute", "compute"),
    ("unicron_lightning/worker/step.py", "_await_reductions", "reduce"),
    ("unicron_lightning/worker/step.py", "_launch", "reduce"),
    ("unicron_lightning/worker/step.py", "_take_held", "reduce"),
    ("unicron_lightning/worker/step.py", "_commit", "commit"),
    ("unicron_lightning/worker/step.py", "_vote", "commit"),
    ("unicron_lightning/worker/step.py", "compare_states", "commit"),
    ("unicron_lightning/worker/witness.py", "compare", "commit"),
    ("unicron_lightning/worker/engine.py", "_recover", "recovery"),
    ("strategies/passes/evaluation.py", "", "validation"),
    ("strategies/fsdp/steps.py", "evaluate", "validation"),
    ("strategies/megatron/batches.py", "evaluate", "validation"),
    ("strategies/megatron/batches.py", "_evaluate_stage", "validation"),
    ("strategies/fsdp/steps.py", "", "compute"),
    ("unicron_lightning/fsdp/rows.py", "call", "compute"),
    ("strategies/megatron/batches.py", "", "compute"),
    ("loops/evaluation_loop.py", "", "validation"),
    ("strategies/fault_tolerant.py", "save_checkpoint", "checkpoint"),
    ("connectors/checkpoint_connector.py", "", "checkpoint"),
    ("strategies/fault_tolerant.py", "boundary", "boundary"),
    ("loops/optimization/automatic.py", "_optimizer_step", "optimizer"),
    ("trainer/call.py", "_call_callback_hooks", "callback"),
    ("strategies/fault_tolerant.py", "setup", "setup"),
    ("strategies/fault_tolerant.py", "setup_environment", "setup"),
    ("trainer/trainer.py", "fit", "fit"),
)
"""Phase of a worker by the frames on its stack."""


@dataclass(frozen=True, kw_only=True)
class ExceptionReport:
    """Contents of a `wire.ErrorReport`."""

    kind: str
    cause: str
    phase: str
    details: dict[str, Any]


def describe(exception: BaseException) -> ExceptionReport:
    """Describe an exception, with its traceback. Pure, and never raises for an odd exception."""
    chain = _chain(exception)
    texts = [f"{_type_of(each)}: {_text(each)}" for each in chain]
    found = classify(texts)
    frames = traceback.extract_tb(exception.__traceback__)
    details: dict[str, Any] = {
        "type": _type_of(exception),
        "message": _text(exception)[:_MESSAGE_CHARACTERS],
        "from": [text[:_MESSAGE_CHARACTERS] for text in texts[1:]],
        "frames": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-_FRAMES:]],
        "pattern": None if found is None else found.name,
    }
    if isinstance(exception, SilentCorruption):
        details["suspect"] = exception.suspect
    lines = [line.strip() for line in _text(exception).splitlines() if line.strip()]
    cause = f"{type(exception).__name__}: {lines[0]}" if lines else type(exception).__name__
    kind = next((kind for error, kind in _OWN_KINDS if isinstance(exception, error)), None)
    return ExceptionReport(
        kind=kind or (UNKNOWN if found is None else found.kind),
        cause=cause[:_CAUSE_CHARACTERS],
        phase=phase_of([(frame.filename, frame.name) for frame in frames]),
        details=details,
    )


def phase_of(frames: Sequence[tuple[str, str]]) -> str:
    """Return the phase, by file and function of each frame, the innermost last; ``script`` if none is known."""
    for filename, function in reversed(frames):
        for part, name, phase in PHASES:
            if part in filename and name in ("", function):
                return phase
    return "script"


def _chain(exception: BaseException) -> list[BaseException]:
    """Return the exception and its causes, as Python prints them."""
    chain = [exception]
    while len(chain) < _CHAIN:
        last = chain[-1]
        before = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if before is None or any(before is each for each in chain):
            break
        chain.append(before)
    return chain


def _type_of(exception: BaseException) -> str:
    kind = type(exception)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception:  # noqa: BLE001 - a __str__ that fails must not hide its own error
        return "(its message is not available)"
