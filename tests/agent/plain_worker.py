"""A plain script as it runs under c10d: makes its process group by ``env://``, independent of Unicron.

Usage: plain_worker.py FOLDER. Notes its ranks in FOLDER/events.jsonl, then reduces until FOLDER/finish exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])


def note(what: str, **fields: object) -> None:
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK")
    line = {"what": what, "pid": os.getpid(), "at": time.time(), **{name: int(os.environ[name]) for name in names}}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({**line, **fields}) + "\n")


note("started")
dist.init_process_group("gloo")
note("joined", world=dist.get_world_size())
steps = 0
while True:
    done = torch.tensor([int((folder / "finish").exists())])
    dist.all_reduce(done)
    steps += 1
    if steps == 3:
        note("steps")
    if done.item() == dist.get_world_size():
        break
    time.sleep(0.02)
note("finished")
dist.destroy_process_group()
