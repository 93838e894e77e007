"""A worker that recovers in process, without torch: speaks the protocol and notes the messages it receives.

Usage: toy_worker.py FOLDER. It appends one JSON line per event to FOLDER/events.jsonl and succeeds once FOLDER/finish
exists (members) or the task is over (others). It does not start while FOLDER/hold exists.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from unicron_lightning import environ, wire
from unicron_lightning.parent_death import tie_to_agent
from unicron_lightning.prepared import set_by_script


class ToyWorker:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = environ.read()
        self.epoch: wire.Epoch | None = None
        self.lock = threading.Lock()
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(self.env.agent_socket)

    def note(self, what: str, **fields: Any) -> None:
        line = {"what": what, "pid": os.getpid(), "worker": self.env.worker, "at": time.time(), **fields}
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def say(self, message: wire.Message) -> None:
        with self.lock:
            self.socket.sendall(wire.encode(message) + b"\n")

    def beat(self) -> None:
        name = self.env.worker
        while True:
            self.say(wire.Heartbeat())
            member = self.epoch is not None and any(m.worker == name for m in self.epoch.members)
            if member and (self.folder / "finish").exists():
                self.note("finished")
                self.say(wire.WorkerDone(worker=name))  # the end of the task may end this process at once
                os._exit(0)
            time.sleep(0.1)

    def run(self) -> None:
        env = self.env
        while (self.folder / "hold").exists():
            time.sleep(0.02)
        self.note("started", rank=int(os.environ["RANK"]), world=int(os.environ["WORLD_SIZE"]), agent_pid=os.getppid())
        self.say(wire.WorkerHello(worker=env.worker, local_rank=env.local_rank, pid=os.getpid(), capacity=8))
        if (changed := set_by_script.noted()) is not None:
            self.say(wire.Imported(worker=env.worker, changed=tuple(changed)))
        threading.Thread(target=self.beat, daemon=True).start()
        for line in self.socket.makefile("rb"):
            self.hear(wire.decode_to_worker(line))
        os._exit(76)

    def hear(self, message: Any) -> None:
        name = self.env.worker
        match message:
            case wire.Welcome():
                self.note("welcome", founder=message.founder, life=message.life)
                self.say(wire.WorkerReady(worker=name, epoch=0, state={"step": 0, "has_state": False}))
            case wire.Epoch():
                self.epoch = message
                members = [member.worker for member in message.members]
                self.note("epoch", number=message.number, kind=message.kind, members=members)
                if name in members:
                    state = {"step": message.number, "has_state": True}
                    self.say(wire.WorkerReady(worker=name, epoch=message.number, state=state))
            case wire.Go() if self.epoch is not None:
                members = [member.worker for member in self.epoch.members]
                if name in members:
                    self.note("go", number=message.epoch, rank=members.index(name), world=len(members))
            case wire.TaskOver():
                self.note("over", succeeded=message.succeeded)
                os._exit(0 if message.succeeded else 1)


if __name__ == "__main__":
    tie_to_agent()
    ToyWorker(Path(sys.argv[1])).run()
