"""Names and errors that are meant to deceive a terminal are shown, not obeyed, by every command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unicron_lightning.cli import main
from unicron_lightning.cli.inspection import PHASES, Speeds, _print_details, _print_table, _task_table, picture
from unicron_lightning.cli.orders import print_jobs
from unicron_lightning.cli.output import all_visible, console, log_visible, visible

EVIL = "[red]\x1b]0;owned\x07\u202e\n:smile:[/nothing]\x9b31m"
SHOWN = "[red]\\x1b]0;owned\\x07\\u202e\\n:smile:[/nothing]\\x9b31m"
MEMBER = {"rank": 0, "worker": EVIL, "node": EVIL, "alive": True, "finished": False, "step": 1}
AGENT = {"agent": EVIL, "node": EVIL, "connected": True, "slot": "waiting", "unhealthy": EVIL, "place": None}
TASK: dict[str, Any] = {
    "min_nodes": 1,
    "max_nodes": 1,
    "target": None,
    "state": "running",
    "epoch": 1,
    "life": 1,
    "incidents": 0,
    "restarts": 0,
    "degraded": False,
    "checkpoint": {"step": 1, "path": EVIL},
    "stragglers": {EVIL: 2.0},
    "last_failure": {"worker": EVIL, "node": EVIL, "cause": EVIL},
    "members": [MEMBER],
    "agents": [AGENT],
    "candidates": [{"worker": EVIL}],
    "starting": [],
    "progress": None,
    "goodput": 0.5,
}
STATUS = {
    "coordinator": {"pid": 1, "version": EVIL, "host": EVIL, "port": 1, "store_error": EVIL},
    "tasks": {EVIL: TASK},
    "drained": [EVIL],
    "cordoned": {EVIL: EVIL},
    "waiting": {EVIL: EVIL},
    "staying": {EVIL: EVIL},
    "lost": {EVIL: 1.0},
    "assigned": {EVIL: EVIL},
    "newest_incidents": [],
    "nodes": {EVIL: {"connected": True, "drained": False, "host": EVIL,
                     "slots": {EVIL: {"assigned": EVIL, "agents": [EVIL]}}}},
}  # fmt: skip
JOB = {"name": EVIL, "state": "failed", "reason": EVIL, "managed": True, "submitted_at": 1.0, "ended_at": 1.0}
COSTS = {"seconds": 1.0, "worker_seconds": 1.0, "waf_seconds": None}
COSTS_BY_PHASE = {"detection": COSTS, "transition": COSTS, "sub_healthy": COSTS}
BILL = {
    "task": EVIL,
    "incident": EVIL,
    "outcome": EVIL,
    "cause": EVIL,
    "failures": 1,
    "fault_at": 1.0,
    "known_at": 1.0,
    "stepped_at": None,
    "closed_at": None,
    "slots_before": 1,
    "workers_before": 1,
    "weight": 1.0,
    "flops_per_step": None,
    "phases": COSTS_BY_PHASE,
}
VERSION = {"step": 1, "tier": EVIL, "state": EVIL, "life": 1, "bytes": 3 << 20, "holders": {EVIL: [0, 1]}}
ANSWERS: dict[str, Any] = {
    "/v1/tasks/x/checkpoints": [VERSION],
    "/v1/status": STATUS,
    "/v1/jobs": [JOB],
    "/v1/incidents": {"incidents": [BILL], "totals": {"incidents": 1, "unknown_waf": 0, "phases": COSTS_BY_PHASE}},
    "/v1/events": [{"seq": 1, "at": 1.0, "name": EVIL, "task": EVIL, "incident": EVIL, "fields": {EVIL: EVIL}}],
}


def evil(_endpoint: str, method: str, target: str, _access: Any, _body: bytes = b"") -> tuple[int, bytes]:
    """Answers of a coordinator that has received malicious names."""
    if method == "GET":
        return 200, json.dumps(ANSWERS[target.partition("?")[0]]).encode()
    if target.endswith("/cancel"):
        return 404, json.dumps({"error": EVIL}).encode()
    return 200, json.dumps(
        {"task": EVIL, "nodes": EVIL, "tp": EVIL, "pp": EVIL, "drained": [EVIL], "staying": {EVIL: EVIL}}
    ).encode()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("unicron_lightning.cli.client.request", evil)
    return "127.0.0.1:1"


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["events"],
        ["incidents"],
        ["incidents", "--csv"],
        ["jobs"],
        ["checkpoints", "x"],
        ["top", "--once", "--interval", "0.01"],
        ["cancel", "x"],
        ["resize", "x", "1"],
        ["relayout", "x", "--tp", "1", "--pp", "1", "--ep", "1"],  # the answer names no size of 1 but TP and PP
        ["drain", "x"],
        ["status", "--json"],
        ["status", "--task", EVIL + "?"],
    ],
    ids=lambda words: words[0],
)
def test_what_comes_from_elsewhere_is_shown_and_not_obeyed(
    words: list[str], endpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit) as ended:
        main([*words, "--endpoint", endpoint])
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert ended.value.code == (2 if words[0] == "cancel" or "--task" in words else 0), captured.err
    assert all(line.isprintable() for line in text.split("\n"))
    asked = json.dumps(EVIL)[1:-1] if "--json" in words else repr(EVIL)[1:-1] if "--task" in words else SHOWN
    assert asked in text


def test_texts_are_imported_without_the_commands() -> None:
    """By training: a worker's start is its imports."""
    code = "import sys, unicron_lightning.cli.output; print(*[name for name in sys.modules if '.cli' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "unicron_lightning.cli unicron_lightning.cli.output\n"


def test_visible_text_is_left_as_it_is() -> None:
    assert visible("rank 3: größer, 中文 [0]") == "rank 3: größer, 中文 [0]"
    assert visible("a\nb", lines=True) == "a\nb"
    assert visible("\ud800") == "\\ud800"
    assert all_visible({"a\x1b": ["\r", 1, None]}) == {"a\\x1b": ["\\r", 1, None]}


def test_tables_fit_80_columns_and_cut_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    node, name = "gpu-node-000.cluster.example", "sweep-of-a-long-name-1a2b3c-1234"
    worker = f"{node}-1a2b3c4d/0#1"
    job = {"name": name, "state": "cancelled", "reason": "needs 4 nodes, 3 slots are usable", "managed": False,
           "submitted_at": 1.0, "ended_at": None}  # fmt: skip
    cost = {"seconds": 12345.67, "worker_seconds": 76543.21, "waf_seconds": 1.23e15}
    bill = {"task": name, "incident": "i12", "outcome": "recovered", "cause": "worker_died: signal 9", "fault_at": 1.0,
            "known_at": 1.0, "stepped_at": None, "closed_at": 2.0, "failures": 1, "workers_before": 2,
            "slots_before": 2, "weight": 1.0, "phases": dict.fromkeys(PHASES, cost)}  # fmt: skip
    task = {**TASK, "members": [{**MEMBER, "worker": worker, "node": node}], "candidates": [], "stragglers": {},
            "agents": [], "last_failure": None, "checkpoint": None,
            "progress": {"step": 1234567, "metrics": {"loss": 2.0}}}  # fmt: skip
    status = {**STATUS, "tasks": {name: task}, "drained": [], "waiting": {}, "staying": {}, "lost": {},
              "nodes": {node: {"connected": True, "drained": False, "host": node,
                               "slots": {"0-3": {"assigned": name, "agents": [name]}}}}}  # fmt: skip
    print_jobs([job])
    totals = {"incidents": 1, "unknown_waf": 0, "phases": dict.fromkeys(PHASES, cost)}
    _print_table({"incidents": [bill, {**bill, "task": "t"}], "totals": totals}, "none")
    _print_details({"incidents": [bill]}, "i12")
    console().print(_task_table(name, task))
    console().print(picture(all_visible(status), Speeds(), None))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    cut = [line.split()[0] for line in text.splitlines() if "…" in line]
    assert cut == ["i12", "i12"], "an incident is a line: the rest of its cause is in its details"
    for word in (
        "worker_died: signal 9",
        "cancelled",
        "torchrun",
        "3.43 h",
        "76543.21",
        "1.23e+15",
        "recovered",
        "member",
        "1234567",
        "0-3",
    ):
        assert word in text, f"in one piece: {word}"


def test_bash_completes_commands_options_and_files(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit):
        main(["completion", "bash"])
    script = tmp_path / "completion.sh"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "job.yaml").touch()

    def completed(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        code = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
        code += "_shtab_unicron; echo ${COMPREPLY[@]}"
        ended = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
        return ended.stdout.split()

    assert completed("unicron", "su") == ["submit"]
    assert completed("unicron", "submit", "--arr") == ["--array"]
    assert "job.yaml" in completed("unicron", "submit", "jo")
    assert completed("unicron", "completion", "z") == ["zsh"]


def test_each_command_describes_itself_within_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def help_of(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    text = help_of()
    assert "exit status:" in text and "UNICRON_ENDPOINT" in text
    commands = [name for name in re.findall(r"^    ([a-z]+)\b", text, re.MULTILINE) if name != "coordinator"]
    assert len(commands) > 20
    for command in commands:
        shown = help_of(command)
        assert max(map(len, shown.splitlines())) <= 80, command
        assert re.search(r"\n\n[A-Z].*?\.\n\n(positional arguments|options):", shown, re.DOTALL), command
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "words", [["resize", "x", "1"], ["relayout", "x", "--tp", "1", "--pp", "1"], ["drain", "x"], ["undrain", "x"]]
)
def test_an_order_prints_the_answer_as_json(words: list[str], endpoint: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json", "--endpoint", endpoint])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["drained"] == [EVIL]


def test_a_log_keeps_its_colours_and_nothing_that_a_terminal_obeys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = "loss \x1b[1;31m0.5\x1b[0m\t 50 %\r60 %\n\u00e9"
    assert log_visible(kept) == kept
    assert log_visible(EVIL) == SHOWN.replace("\\n", "\n")
    assert log_visible("\x1b]52;c;cm0gLXJm\x07\x1b[6n\x1b[2J") == r"\x1b]52;c;cm0gLXJm\x07\x1b[6n\x1b[2J"
    folder = tmp_path / "t" / "n" / "0"
    folder.mkdir(parents=True)
    (folder / "rank0.log").write_text(kept + EVIL)
    os.mkfifo(folder / "rank1.log")
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["logs", "t", "--logs", str(tmp_path)])
    assert capsys.readouterr().out == kept + SHOWN.replace("\\n", "\n")
