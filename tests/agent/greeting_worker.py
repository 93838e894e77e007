"""`toy_worker`, after it has printed some variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from toy_worker import ToyWorker

from unicron_lightning.parent_death import tie_to_agent

tie_to_agent()
print(os.environ["GREETING"], os.environ.get("FROM_SHELL"), os.environ.get("KEY"), "UNICRON_TOKEN" in os.environ)
ToyWorker(Path(sys.argv[1])).run()
