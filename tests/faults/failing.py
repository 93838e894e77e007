"""The training run of `train`, with workers that fail by themselves again and again.

In the settings: ``raises_from``, the step from which on a worker raises; ``on``, the node of those that do (absent:
all); ``hangs``, the node of one that hangs in its first recovery: it lives, but never says that it is ready.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import train

SETTINGS = json.loads((Path(sys.argv[1]) / "settings.json").read_text())
NODE = os.environ.get("UNICRON_NODE", "alone")


class Failing(train.Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step >= SETTINGS.get("raises_from", 1 << 30) and SETTINGS.get("on", NODE) == NODE:
            raise RuntimeError("a bad sample")
        return super().training_step(batch, batch_idx)


class Hanging(train.Watch):
    def _point(self, module: train.Model, name: str, *where: Any) -> None:
        if name == "exchange" and where[0] > 1 and SETTINGS.get("hangs") == NODE and not self.joined():
            time.sleep(1000)
        super()._point(module, name, *where)

    def joined(self) -> bool:
        """Whether the recovery has been hung in already: the successor goes through."""
        path = self._folder / "hung"
        if self._faults.engine.world.kind != "fail" or path.exists():
            return True
        path.touch()
        return False


if __name__ == "__main__":
    train.Model = Failing  # type: ignore[misc]
    train.Watch = Hanging  # type: ignore[misc]
    train.main()
