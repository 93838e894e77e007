"""Tables on disk: CSV, or Parquet by pyarrow. Equal rows give equal bytes."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from unicron_lightning.coordinator.incidents.record import PHASES
from unicron_lightning.errors import ConfigError
from unicron_lightning.simulate.output.summaries import SummaryRow
from unicron_lightning.simulate.result import SimIncident, SimulationResult
from unicron_lightning.simulate.settings import Format


def save_table(path: Path, rows: Sequence[SummaryRow], form: Format) -> Path:
    """Write rows; columns are those of all rows, in the order of first appearance.

    Args:
        path: without the suffix, which is added.
        rows: the table.
        form: format of the file.

    Returns:
        The file.

    Raises:
        ConfigError: pyarrow is needed and not installed.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    file = path.with_name(f"{path.name}.{form}")
    if form == "parquet":
        try:
            import pyarrow
            from pyarrow import parquet
        except ModuleNotFoundError as error:
            needed = "expected it from: pip install 'unicron-lightning[simulate]'"
            raise ConfigError(f"output.format=parquet: pyarrow is not installed, {needed}") from error
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
        parquet.write_table(table, file)
        return file
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return file


def save_result(folder: Path, result: SimulationResult, row: SummaryRow, form: Format) -> None:
    """Write one simulation: ``row.json``, the table of WAF over time, and that of incidents."""
    folder.mkdir(parents=True, exist_ok=True)
    times = result.times.tolist()
    values = result.values.tolist()
    save_table(folder / "waf", [{"seconds": t, "waf": v} for t, v in zip(times, values, strict=True)], form)
    save_table(folder / "incidents", list(_incidents(result.incidents)), form)
    # Written last and appearing whole, so that a folder that contains it is complete whenever the sweep is interrupted.
    text = json.dumps({**row, "curve": [times, values]})
    part = folder / "row.json.part"
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(folder / "row.json")


def _incidents(incidents: Iterable[SimIncident]) -> Iterable[SummaryRow]:
    for incident in incidents:
        row: dict[str, str | int | float] = {"task": incident.task, "kind": incident.kind, "at": incident.at}
        for phase in PHASES:
            row[f"{phase}_seconds"] = incident.seconds[phase]
            row[f"{phase}_waf"] = incident.waf_seconds[phase]
        yield row
