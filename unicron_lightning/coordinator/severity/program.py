"""Identity of errors of the program itself, by which a retry that fails in the same way is recognised."""

from __future__ import annotations

from typing import Any, Final

from unicron_lightning import wire

_ELSEWHERE: Final = ("/site-packages/", "/dist-packages/", "/lib/python3", "/unicron_lightning/")
"""Parts of the paths of libraries, Python and this package: frames outside them are the user's."""
_FRAMES: Final = 12


def frames_of(message: wire.ErrorReport) -> tuple[str, ...]:
    """The last frames of the exception, the innermost last: ``file:line function``."""
    frames = message.details.get("frames")
    return tuple(str(frame)[:300] for frame in frames[-_FRAMES:]) if isinstance(frames, list) else ()


def fault_of(message: wire.ErrorReport, kind: str) -> str:
    """Identify an exception of the program: its type, the place that raised it, and the step.

    Machines and networks fail by other kinds, and may work when tried again.

    Args:
        message: the worker's report.
        kind: its kind, after the user's patterns.

    Returns:
        "" for everything that is no unclassified exception with a traceback.
    """
    frames = frames_of(message)
    if kind != "other_software_error" or not frames or not message.ends:
        return ""
    own = [frame for frame in frames if not any(part in frame for part in _ELSEWHERE)]
    places = dict.fromkeys([frames[-1], *own[-1:]])
    return f"{_type(message.details)} in {', called by '.join(map(_short, places))}, after step {message.step}"


def _type(details: dict[str, Any]) -> str:
    return str(details.get("type", ""))[:200]


def _short(frame: str) -> str:
    """Without the folder, which may differ between nodes."""
    return frame.rsplit("/", 1)[-1]
