"""A worker's start is its imports: those of the strategy are few beside torch's and Lightning's."""

from __future__ import annotations

import subprocess
import sys

UNUSED = ("torch.distributed.checkpoint", "torch.distributed.tensor", "unicron_lightning.cli.commands", "aiohttp")


def test_the_strategy_imports_nothing_that_only_some_workers_use() -> None:
    code = "import sys, lightning.pytorch, unicron_lightning.strategies.unicron\n"
    code += f"print([name for name in {UNUSED} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
