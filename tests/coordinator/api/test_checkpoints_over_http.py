"""``unicron checkpoints`` shows what a real coordinator knows of states in memory and on disk."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from coordinator.membership.test_memory import copy
from coordinator.shell import Coordinator, connected, get, train

from unicron_lightning import wire


async def test_versions_are_listed_with_tier_holders_and_size(tmp_path: Path):
    with Coordinator(tmp_path / "state") as coordinator:
        async with connected(coordinator.url, "a", "b", nodes=(2, 2)) as agents:
            a, b = agents
            await train(agents)
            url = f"{coordinator.url}/v1/tasks/t/checkpoints"
            assert await get(url) == []
            held = [copy(8, 0), copy(8, 1)]
            await a.say(wire.StateHeld(copies=(held[0], copy(12, 0))))
            await b.say(wire.StateHeld(copies=(held[1],)))
            digest = "0" * 64
            for agent in agents:  # all workers report a checkpoint
                saved = wire.CheckpointSaved(worker=agent.worker, path="/x.ckpt", step=8, digest=digest, bytes=3 << 20)
                await agent.say(saved)
            found = await get(url)
            while len(found) < 3:
                found = await get(url)
            command = [sys.executable, "-m", "unicron_lightning.cli", "checkpoints", "t"]
            command += ["--endpoint", f"127.0.0.1:{coordinator.port}"]
            environment = {**os.environ, "COLUMNS": "200"}
            about = {"capture_output": True, "text": True, "timeout": 60, "check": True, "env": environment}
            shown = (await asyncio.to_thread(subprocess.run, command, **about)).stdout
    assert [(each["step"], each["tier"], each["state"], each["bytes"]) for each in found] == [
        (12, "memory", "incomplete", 10),
        (8, "memory", "complete", 20),
        (8, "disk", "reported", 3 << 20),
    ]
    assert found[1]["holders"] == {"a": [0], "b": [1]}
    assert found[2]["holders"] == {"/x.ckpt": []} and found[2]["digest"] == digest
    assert "3.0 MiB" in shown and "a (0), b (1)" in shown and "/x.ckpt" in shown
