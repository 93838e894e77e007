"""Claims and their outcomes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console


def report(console: Console, checks: Sequence[tuple[str, bool]]) -> bool:
    """Print each claim with its outcome; return whether all hold."""
    for text, passed in checks:
        console.print(f"[{'green' if passed else 'bold red'}]{'ok  ' if passed else 'FAIL'}[/] {text}")
    return all(passed for _, passed in checks)
