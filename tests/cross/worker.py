"""A worker of a case, or the process that runs it alone: ``FOLDER NAME``. It writes the result of its training."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cross.cases import Case
from cross.planted import FAULTS
from cross.training import save_old, train


def main(folder: Path, name: str) -> None:
    """Train, and write the result."""
    alone = name == "alone"
    if alone:
        folder.mkdir(exist_ok=True)
    case = Case.from_text((folder.parent if alone else folder).joinpath("case.json").read_text())
    if name == "old":
        return save_old(case, folder)
    if case.planted and not alone:
        FAULTS[case.planted]()
    result = json.dumps(train(case, folder, alone=alone))
    path = folder / ("result" if alone else f"result-{os.environ['RANK']}-{os.getpid()}")
    path.with_suffix(".part").write_text(result)
    path.with_suffix(".part").rename(path.with_suffix(".json"))
    return None
