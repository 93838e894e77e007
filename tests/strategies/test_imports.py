"""The start of a worker, and of its writer, is their imports: few beside torch's and Lightning's."""

from __future__ import annotations

import subprocess
import sys

import pytest

UNUSED = ("torch.distributed.checkpoint", "torch.distributed.tensor", "unicron_lightning.cli.commands", "aiohttp")


@pytest.mark.parametrize(
    "modules", ["lightning.pytorch, unicron_lightning.strategies.unicron", "unicron_lightning.checkpoints.writer"]
)
def test_strategy_and_writer_import_nothing_that_only_some_workers_use(modules: str) -> None:
    code = f"import sys, {modules}\n"
    code += f"print([name for name in {UNUSED} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_an_agent_imports_nothing_of_training() -> None:
    unused = ("lightning", "unicron_lightning.strategies", "unicron_lightning.data")
    code = f"import sys, unicron_lightning.agent.handler\nprint([name for name in {unused} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
