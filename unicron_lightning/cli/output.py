r"""Display of untrusted text: names, labels and errors come over the network, and may be meant to deceive.

Control characters (escape sequences and newlines among them), and characters that are invisible or change the direction
of writing, are shown as escapes such as ``\x1b``. Text is never interpreted as terminal markup.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_ODD: Final = re.compile(r"(\x1b\[[0-9;]*m)|[^\n\r\t -~]")


def visible(text: str, *, lines: bool = False) -> str:
    """Return a text as one line of visible characters, or as several if its own newlines stay (``lines``)."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or (lines and each == "\n") else _escaped(each) for each in text)


def log_visible(text: str) -> str:
    """Return a piece of a program's output with the colours, tabs and carriage returns that it may have.

    Other escape sequences could write to the clipboard, or have the terminal type an answer.
    """
    return _ODD.sub(lambda found: found[0] if found[0].isprintable() or found[1] else _escaped(found[0]), text)


def all_visible(value: Any) -> Any:
    """Make all texts in an answer of the coordinator (decoded JSON) visible, keys included."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, list):
        return [all_visible(each) for each in value]
    if isinstance(value, dict):
        return {visible(key): all_visible(each) for key, each in value.items()}
    return value


def duration(seconds: float) -> str:
    """Return seconds in a readable unit."""
    if abs(seconds) < 1:
        return f"{1e3 * seconds:.0f} ms"
    if abs(seconds) < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if abs(seconds) < 7200 else f"{seconds / 3600:.2f} h"


def clock(at: float) -> str:
    """Return a time.time() as a local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def printed(options: argparse.Namespace, answer: Any, *shown: str) -> int:
    """Print an answer as JSON if ``--json`` is given, else these lines; return the exit status 0."""
    print(json.dumps(answer, indent=2) if options.json else "\n".join(shown))
    return 0


def console() -> Console:
    """Return the console for tables; it interprets no markup."""
    from rich.console import Console

    class Pipe(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # for `cli.main`, as of other commands; rich ends the process with status 1

    return Pipe(markup=False, emoji=False)


def table(*columns: str, right: tuple[str, ...] = (), **settings: Any) -> Table:
    """Return a table with these columns, which fits 80 columns: a long word is continued on the next line.

    Args:
        columns: the headings.
        right: those of columns of numbers.
        settings: further arguments of rich's `Table`.
    """
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), **settings)
    for column in columns:
        if column in right:
            made.add_column(column, justify="right", no_wrap=True)
        else:
            made.add_column(column, overflow="fold")
    return made


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
