"""Errors and words of ``unicron run``; `tests/examples/test_first_day.py` runs it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from unicron_lightning.cli import main
from unicron_lightning.cli.run import divided


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["run", *words])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_words_after_the_dashes_are_the_scripts() -> None:
    assert divided(["run", "a.py", "--workers", "3", "--", "--lr", "1", "--", "x"]) == (
        ["run", "a.py", "--workers", "3"],
        ["--lr", "1", "--", "x"],
    )
    assert divided(["status", "--task", "--"]) == (["status", "--task", "--"], [])
    assert divided([]) == ([], [])


def test_errors_quote_what_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "run gone.py: no such file; expected a training script" in error_of(capsys, "gone.py")
    script = tmp_path / "train.py"
    script.touch()
    assert "--workers 0: expected a number >= 1" in error_of(capsys, str(script), "--workers", "0")
    assert "unrecognized arguments: --lr" in error_of(capsys, str(script), "--lr", "1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        words = (str(script), "--endpoint", endpoint)
        assert f"endpoint {endpoint}: Address already in use; expected a free port" in error_of(capsys, *words)
    words = (str(script), "--endpoint", "192.0.2.1:29999")
    assert "endpoint 192.0.2.1:29999: expected 127.0.0.1:PORT" in error_of(capsys, *words)
