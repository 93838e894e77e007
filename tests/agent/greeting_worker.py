"""`toy_worker`, after it has printed the variable GREETING."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from toy_worker import ToyWorker

from unicron_lightning.parent_death import tie_to_agent

tie_to_agent()
print(os.environ["GREETING"])
ToyWorker(Path(sys.argv[1])).run()
