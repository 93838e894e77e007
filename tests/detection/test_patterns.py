"""Real messages and their kinds; the table is data, and users' own rows take precedence."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from unicron_lightning.coordinator.severity.record import SEVERITY
from unicron_lightning.detection.exceptions import PHASES, describe, phase_of
from unicron_lightning.detection.health import UNKNOWN, Pattern, builtin, classify
from unicron_lightning.errors import ConfigError

MESSAGES = msgspec.yaml.decode(Path(__file__).with_name("messages.yaml").read_bytes(), type=dict[str, list[str]])


@pytest.mark.parametrize(
    ("kind", "message"),
    [(kind, text) for kind, texts in MESSAGES.items() for text in texts],
    ids=lambda text: text[:60],
)
def test_what_libraries_print_has_its_kind(kind: str, message: str) -> None:
    found = classify([message])
    assert (UNKNOWN if found is None else found.kind) == kind, found


def test_the_table_is_sound() -> None:
    rows = builtin()
    assert len({row.name for row in rows}) == len(rows)
    assert {row.kind for row in rows} <= set(SEVERITY)
    assert set(MESSAGES) <= set(SEVERITY)
    used = {found.name for texts in MESSAGES.values() for text in texts if (found := classify([text]))}
    assert len(used) > 0.8 * len(rows), {row.name for row in rows} - used


def test_the_first_text_with_a_match_counts() -> None:
    assert classify(["RuntimeError: CUDA error: x", "OSError: No space left on device"]).name == "cuda"


def test_a_malformed_pattern_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("pattern '(' of kind cuda_error: missing")):
        Pattern(pattern="(", kind="cuda_error")


def test_torch_and_numpy_still_print_what_the_table_knows() -> None:
    with pytest.raises(RuntimeError) as memory:
        torch.empty(1 << 50)
    with pytest.raises(MemoryError) as array:
        np.empty(1 << 50)
    with pytest.raises(Exception) as store:
        TCPStore("127.0.0.1", 1, is_master=False, timeout=datetime.timedelta(milliseconds=50))
    assert [describe(caught.value).kind for caught in (memory, array)] == ["out_of_memory", "out_of_memory"]
    assert describe(store.value).kind in ("other_network_error", "connection_failed"), store.value


def test_an_exception_is_told_with_what_it_came_from() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise TypeError

    try:
        try:
            raise ConnectionResetError(104, "Connection reset by peer")
        except OSError as error:
            raise RuntimeError("the batch could not be read\nin two lines") from error
    except RuntimeError as error:
        told = describe(error)
    assert (told.kind, told.cause) == ("connection_failed", "RuntimeError: the batch could not be read")
    assert told.details["from"] == ["ConnectionResetError: [Errno 104] Connection reset by peer"]
    assert told.details["frames"][-1].endswith("test_an_exception_is_told_with_what_it_came_from")
    assert msgspec.json.decode(msgspec.json.encode(told.details)) == told.details
    assert describe(Odd()).cause.startswith("Odd: (its message")
    assert describe(KeyError("x")).kind == UNKNOWN


def test_the_phase_is_that_of_the_innermost_frame_that_is_known() -> None:
    step, batch = "/p/unicron_lightning/worker/step.py", "/p/unicron_lightning/strategies/micro_batch.py"
    assert phase_of([(step, "attempt"), (step, "_compute"), (batch, "run"), ("model.py", "forward")]) == "compute"
    assert phase_of([(step, "_compute"), (batch, "run"), ("/x/unicron_lightning/data/fetch.py", "get")]) == "data"
    assert phase_of([(step, "attempt"), (step, "_commit")]) == "commit"
    assert phase_of([("train.py", "<module>")]) == "script"


def test_the_functions_of_each_phase_exist() -> None:
    root = Path(__file__).parents[2]
    for part, name, _ in PHASES:
        if part.startswith("strategies/") or (part.startswith("unicron_lightning/") and part.endswith(".py")):
            assert f"def {name}" in (root / part).read_text(), (part, name)
