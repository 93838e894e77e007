"""``python -m unicron_lightning.demo``: a task that trains through failures, then two that share a cluster."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from rich.console import Console

from unicron_lightning.demo import failures, sharing


def main() -> int:
    """Run the demonstration; return the exit status: 0 if every claim was shown."""
    parser = argparse.ArgumentParser(prog="python -m unicron_lightning.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for logs and the pictures")
    parser.add_argument("--act", type=int, choices=(1, 2), help="run only this act")
    parser.add_argument("--steps-per-epoch", type=int, default=130, help="steps in each of the first act's two epochs")
    options = parser.parse_args()
    console = Console(width=110)
    shutil.rmtree(options.out, ignore_errors=True)
    passed = []
    if options.act != 2:
        console.rule("[bold]First act: one task, three failures")
        passed.append(failures.show(console, options.out, options.steps_per_epoch))
    if options.act != 1:
        console.rule("[bold]Second act: two tasks share six nodes")
        passed.append(sharing.show(console, options.out / "sharing"))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
