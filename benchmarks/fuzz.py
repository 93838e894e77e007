"""A real coordinator and a real daemon, attacked over real sockets with seeded random messages.

    python benchmarks/fuzz.py --minutes 10 --seed 1

Attackers that know the token send messages as agents, as daemons and as operators: well-formed ones with wild values,
damaged ones, and in any order. Others do not know it: half-sent headers, oversize bodies and frames, no HTTP at all.
Meanwhile a small bystander task trains, and every few seconds a healthy client asks for the status: the coordinator
must serve, and the bystander's state be what it was. Ends with status 1 at a death, a traceback in a log, a status that
does not come, or a bystander that was disturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz_attacks import ATTACKS, GONE, Target
from fuzz_bystander import Bystander

from unicron_lightning.cli.client import fetch
from unicron_lightning.local_cluster.processes import Processes, free_port

CHECK_SECONDS = 2.0
START_SECONDS = 60.0
ATTACKERS = 12
TRACEBACK = "Traceback (most recent call last)"


class Fallen(Exception):
    """What must not happen has happened."""


class Run:
    """One run.

    Args:
        folder: for logs and state; must not exist.
        seed: of all choices.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.failure = ""
        self._ending = False
        self._processes = Processes(folder, {}, inside=True)
        self._folder = folder
        self._target = Target(port=free_port(), counts=self.counts)
        self._started = time.monotonic()

    async def go(self, seconds: float) -> None:
        """Attack for so long."""
        try:
            await self._start()
            async with Bystander(self._target.port) as bystander:
                await self._attack(bystander, seconds)
        except Fallen as error:
            self.failure = str(error)
        except (*GONE, ValueError, KeyError) as error:
            self.failure = await self._explain(error)
        finally:
            # The daemon first: without the coordinator it would only wait.
            await asyncio.to_thread(self._processes.stop)

    async def _explain(self, error: Exception) -> str:
        """Return why the tool could not continue: a process that has died, if one has."""
        await asyncio.sleep(1.0)
        try:
            self.check_processes()
        except Fallen as fallen:
            return str(fallen)
        return f"not of the coordinator's: {error!r}"

    async def _start(self) -> None:
        port, python = self._target.port, sys.executable
        state = self._folder.resolve() / "state"
        about = [f"coordinator.port={port}", f"store.state_dir={state}", "coordinator.allow_injection=true"]
        self._processes.start("coordinator", [python, "-m", "unicron_lightning.coordinator", *about])
        await self._serves(START_SECONDS)
        command = [python, "-m", "unicron_lightning.cli", "agent", "--endpoint", f"127.0.0.1:{port}"]
        own = ["--node", "fuzz-real", "--slots", "1", "--logs", str(self._folder.resolve() / "logs")]
        self._processes.start("daemon", [*command, *own])

    async def _serves(self, seconds: float) -> dict[str, Any]:
        """The status, within some seconds."""
        deadline = time.monotonic() + seconds
        while True:
            self.check_processes()
            try:
                return dict(await asyncio.to_thread(fetch, f"127.0.0.1:{self._target.port}", "/v1/status"))
            except Exception as error:
                if time.monotonic() > deadline:
                    raise Fallen(f"no status within {seconds:g} s: {error!r}") from error
                await asyncio.sleep(0.2)

    async def _attack(self, bystander: Bystander, seconds: float) -> None:
        chances = [random.Random(f"{self.seed}/{number}") for number in range(ATTACKERS)]
        attackers = [asyncio.create_task(self._keep_attacking(chance)) for chance in chances]
        try:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                await asyncio.sleep(CHECK_SECONDS)
                status = await self._serves(START_SECONDS)
                self.counts["checks"] += 1
                if wrong := bystander.disturbed(status):
                    self.counts["disturbances"] += 1
                    raise Fallen(f"the bystander was disturbed: {wrong}")
                for attacker in attackers:
                    if attacker.done():
                        attacker.result()  # an error of this tool
        finally:
            self._ending = True
            while running := [attacker for attacker in attackers if not attacker.done()]:
                for attacker in running:  # again: before Python 3.12 `asyncio.wait_for` can lose a cancellation
                    attacker.cancel()
                await asyncio.wait(running, timeout=1.0)

    async def _keep_attacking(self, chance: random.Random) -> None:
        names, weights = zip(*((attack, weight) for attack, weight in ATTACKS.items()), strict=True)
        while not self._ending:
            (attack,) = chance.choices(names, weights)
            self.counts[attack.__name__] += 1
            await attack(self._target, chance)

    def check_processes(self) -> None:
        """Neither process has died, nor logged an error of its own."""
        for name, process in self._processes.started.items():
            if process.poll() is not None:
                self.counts["deaths"] += 1
                raise Fallen(f"the {name} has died with status {process.returncode}")
            log = self._folder / f"{name}.log"
            if (found := log.read_text(errors="replace").count(TRACEBACK)) > 0:
                self.counts["tracebacks"] = found
                raise Fallen(f"{found} tracebacks in {log}")

    def line(self) -> str:
        """The result, on one line."""
        wanted = ("deaths", "tracebacks", "disturbances", "checks", "messages", "answers")
        told = {"seed": self.seed, "seconds": round(time.monotonic() - self._started)}
        told.update({name: self.counts[name] for name in wanted})
        told.update({name: number for name, number in sorted(self.counts.items()) if name not in told})
        return f"fuzz: {'FAILED: ' + self.failure if self.failure else 'ok'} {json.dumps(told)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for logs and state; must not exist (default: a temporary one)")
    options = parser.parse_args()
    run = Run(options.folder or Path(tempfile.mkdtemp(prefix="fuzz-")) / "run", options.seed)
    asyncio.run(run.go(60.0 * options.minutes))
    print(run.line(), flush=True)
    return 1 if run.failure else 0


if __name__ == "__main__":
    sys.exit(main())
