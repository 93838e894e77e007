"""The notification hook with real processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from coordinator.shell import Coordinator, ask

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.server.batch import Hook
from unicron_lightning.local_cluster.processes import until

EVENT = ev.Emit(name="task_over", task="t", incident="i1", fields={"reason": "$(touch no) '"})


async def test_the_command_gets_each_selected_event_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_TOKEN", "secret")
    script = f'cat >> {tmp_path}/out; echo "$UNICRON_EVENT $UNICRON_TASK ${{UNICRON_TOKEN-none}}" >> {tmp_path}/out'
    hook = Hook(["sh", "-c", script], ["task_over"], 30.0)
    for number in range(3):
        hook.note(ev.Emit(name="task_over", task=f"t{number}", incident=None, fields=EVENT.fields))
        hook.note(ev.Emit(name="plan_made", task=None, incident=None))
    await hook.close()
    lines = (tmp_path / "out").read_text().splitlines()
    assert [json.loads(line)["task"] for line in lines[::2]] == ["t0", "t1", "t2"]
    assert json.loads(lines[0]).keys() == {"at", "name", "task", "incident", "fields"}
    assert json.loads(lines[0])["fields"] == EVENT.fields
    assert lines[1::2] == ["task_over t0 none", "task_over t1 none", "task_over t2 none"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sh", "-c", "exit 3"], "status 3"),
        (["/no/such/command"], "No such file or directory"),
        (["sh", "-c", "sleep 60"], "killed after 0.2 s"),
        (["true"], ""),
    ],
)
async def test_a_command_that_fails_is_one_line(
    command: list[str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    hook = Hook(command, ["task_over"], 0.2)
    hook.note(EVENT)
    await hook.close()
    assert [record.levelname for record in caplog.records if "hook" in record.message] == ["WARNING"] * bool(words)
    assert words in caplog.text


async def test_without_a_command_nothing_is_run() -> None:
    hook = Hook([], ["task_over"], 1.0)
    hook.note(EVENT)
    await hook.close()
    assert hook._running is None


async def test_a_coordinator_notifies_of_a_jobs_end(tmp_path: Path) -> None:
    (tmp_path / "hook.sh").write_text(f"cat > {tmp_path}/partial; mv {tmp_path}/partial {tmp_path}/out")
    with Coordinator(
        tmp_path / "state", f"coordinator.hook=[sh,{tmp_path}/hook.sh]", env={"UNICRON_TOKEN": "s"}
    ) as coordinator:
        job = b'{"name": "j", "command": ["train.py"]}'
        assert (await ask(coordinator.url, "POST", "/v1/jobs", job, "s"))[0] == 200
        assert (await ask(coordinator.url, "POST", "/v1/tasks/j/cancel", b"", "s"))[0] == 200
        await asyncio.to_thread(until, "the command's output", (tmp_path / "out").exists)
        event = json.loads((tmp_path / "out").read_text())
        assert (event["name"], event["task"], event["fields"]["reason"]) == ("task_over", "j", "cancelled")
        assert (await ask(coordinator.url, "GET", "/v1/jobs", b"", "s"))[0] == 200
