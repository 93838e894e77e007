"""Has scripts read their command lines: ``parsing.py``, command lines on standard input; prints those that fail.

Each script runs in a fork of this process, which has imported what most of them need, until its ``ArgumentParser`` has
accepted the command line: its imports and the options are right.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

import unicron_lightning

PREPARED = (pl, unicron_lightning)
_parse_args = argparse.ArgumentParser.parse_args


def parse_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
    """Parse the command line and end the process."""
    _parse_args(self, *args, **kwargs)
    os._exit(0)


def run(words: list[str]) -> None:
    """Run a script up to its options, in a process that ends with it."""
    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign]
    sys.argv = words[1:]
    sys.path[0] = str(Path(words[1]).parent)
    runpy.run_path(words[1], run_name="__main__")
    sys.exit("it has ended without a parser")


for line in sys.stdin:
    if not (child := os.fork()):
        run(shlex.split(line))  # ends the process
    if os.waitpid(child, 0)[1]:
        print(f"failed: {line.strip()}")
