"""Every command of README.md, docs and examples starts as it is written, from the wheel, in the folder of its page."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from examples.conftest import Installed
from examples.documented import ALONE, CLUSTER, ELSEWHERE, Run, documented, longest
from fsdp.folders import alone

from unicron_lightning.local_cluster.processes import free_port, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300), pytest.mark.usefixtures("with_figures")]
COMMANDS = documented()
TRAIN = """
import sys
import time
import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

steps = int(sys.argv[2]) if sys.argv[1:2] == ["--max-steps"] else 2

class Paced(pl.Callback):
    def on_train_batch_end(self, *_):
        time.sleep(0.05)  # commands run beside a long training

paced = [Paced()] if steps > 1000 else []
quiet = {"callbacks": paced, "logger": False, "enable_checkpointing": False, "enable_model_summary": False}
trainer = pl.Trainer(strategy="unicron", accelerator="cpu", devices=1, max_epochs=-1, max_steps=steps, **quiet)
trainer.fit(BoringModel())
print(f"finished {trainer.global_step} steps")
"""
JOB = "command: [train.py]\n"


def test_every_documented_command_has_its_run() -> None:
    found = {command: longest(command) for command in COMMANDS}
    assert len(found) > 80
    assert [command for command, begin in found.items() if begin is None] == [], (
        "add them to tests/examples/documented.py"
    )
    assert {*ALONE, *CLUSTER, *ELSEWHERE} - {*found.values()} == set(), "no page has these any more"


def of(table: dict[str, Run]) -> list[str]:
    """Return the documented commands whose runs a table states, in its order."""
    order = list(table)
    chosen = [command for command in COMMANDS if longest(command) in table]
    return sorted(chosen, key=lambda command: order.index(str(longest(command))))


def replaced(command: str, run: Run) -> str:
    """Return a command with the changes of its run, and with values for placeholders."""
    for old, new in (*run.replace, ("HOST", "127.0.0.1"), ("TASK", "gpt"), (" NODE", " b")):
        command = command.replace(old, new)
    return re.sub(r"--task T\b", "--task gpt", command)


STARTED = [command for command in of(ALONE) if not ALONE[str(longest(command))].parsed]


class Shell:
    """Runs documented commands in a user's folders.

    Args:
        installed: the environment.
        folder: for the user's files.
    """

    def __init__(self, installed: Installed, folder: Path) -> None:
        self.port = free_port()
        self.environment = installed.environment
        self.folders = {"checkout": installed.checkout, "user": folder / "user", "sweep": folder / "sweep"}
        for name in ("user", "sweep"):
            self.folders[name].mkdir()
        (self.folders["user"] / "train.py").write_text(TRAIN)
        (self.folders["sweep"] / "train.py").write_text((installed.checkout / "examples/sweep.py").read_text())
        self.started: list[subprocess.Popen[str]] = []

    def start(self, command: str, run: Run, log: Path | None = None) -> subprocess.Popen[str]:
        """Start a command as it is written, but for placeholders and the changes of its run."""
        command = f"{replaced(command, run)} {run.add}".replace("29461", str(self.port))
        with contextlib.ExitStack() as opened:
            output = subprocess.PIPE if log is None else opened.enter_context(log.open("w"))
            shell = subprocess.Popen(
                ["bash", "-c", command], cwd=self.folders[run.folder], env=self.environment, text=True,
                start_new_session=True, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.started.append(shell)
        return shell

    def run(self, command: str, run: Run) -> str:
        """Run a command to its end; return its output."""
        shells = [self.start(command, run) for _ in range(run.at_once)]
        output = "".join(shell.communicate(timeout=200)[0] for shell in shells)
        print(f"$ {command}\n{output}")
        assert {shell.returncode for shell in shells} == {run.status}, output
        assert run.says in output
        return output

    def end(self) -> None:
        """End what still runs, and wait for it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for shell in self.started:
                if shell.poll() is None:
                    os.killpg(shell.pid, number)
            for shell in self.started:
                try:
                    shell.wait(20)
                except subprocess.TimeoutExpired:
                    continue
        for shell in self.started:
            if shell.stdout is not None:
                shell.stdout.close()


@pytest.fixture
def shell(installed: Installed, tmp_path: Path):
    made = Shell(installed, tmp_path)
    yield made
    made.end()


def prepare(command: str, shell: Shell) -> None:
    """Write the files that a page assumes."""
    user = shell.folders["user"]
    if "last.ckpt" in command:
        (user / "checkpoints").mkdir()
        alone(user / "checkpoints/last.ckpt")
    if "cluster.yaml" in command and ">" not in command:
        shell.run("unicron plan --example > cluster.yaml", Run())
    if "events.csv" in command:
        (user / "events.csv").write_text("at,kind,node,worker,repair\n86400,ecc_error,3,,172800\n")
    if "--config-dir" in command:
        (user / "DIR/cluster").mkdir(parents=True)
        (user / "DIR/cluster/mine.yaml").write_text("{}\n")
    if ".zfunc" in command:
        (Path(shell.environment["HOME"]) / ".zfunc").mkdir()


def test_scripts_that_take_long_read_their_command_lines(shell: Shell) -> None:
    lines = [f"{replaced(command, run)}\n" for command in of(ALONE) if (run := ALONE[str(longest(command))]).parsed]
    assert len(lines) > 15
    program = [Path(__file__).with_name("parsing.py")]
    done = subprocess.run(
        ["python", *program], input="".join(lines), cwd=shell.folders["checkout"], env=shell.environment,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("command", STARTED, ids=[command[:90] for command in STARTED])
@pytest.mark.allow_leak("unix_sockets", reason="processes are killed if a command fails")
def test_a_command_starts(command: str, shell: Shell) -> None:
    prepare(command, shell)
    shell.run(command, ALONE[str(longest(command))])


@pytest.mark.allow_leak("unix_sockets", reason="processes are killed at the end")
def test_commands_of_a_running_cluster_do(shell: Shell, tmp_path: Path) -> None:
    user, waiting = shell.folders["user"], of(CLUSTER)
    shell.environment["UNICRON_ENDPOINT"] = f"127.0.0.1:{shell.port}"
    shell.environment["BROWSER"] = "true"
    (user / "logs/version_0").mkdir(parents=True)
    (user / "logs/version_0/metrics.csv").write_text("step,train_loss\n1,2.0\n2,1.0\n")
    (user / "faults.yaml").write_text('["slow x2 rank=0 steps=1"]\n')
    for name in ("task", "prepare", "train", "report"):
        (user / f"{name}.yaml").write_text(JOB)

    def next_run(begin: str) -> tuple[str, Run]:
        command = next(command for command in waiting if longest(command) == begin)
        waiting.remove(command)
        return command, CLUSTER[begin]

    def members() -> int:
        return subprocess.check_output(["unicron", "status"], env=shell.environment, text=True).count("member")

    shell.start(*next_run("unicron coordinator"), log=tmp_path / "plain.log")
    until("a coordinator", lambda: "coordinator_started" in (tmp_path / "plain.log").read_text(), 60)
    shell.end()
    shell.start(*next_run("unicron coordinator coordinator.allow_injection=true"), log=tmp_path / "coordinator.log")
    until("a coordinator", lambda: "coordinator_started" in (tmp_path / "coordinator.log").read_text(), 60)
    agent, _ = next_run("unicron agent")
    for node, slots in (("b", 2), ("c", 1)):
        shell.start(agent, Run(add=f"--slots {slots} --node {node}"), log=tmp_path / f"agent-{node}.log")
    assert "command:" in shell.run(*next_run("unicron submit --example")) + (user / "gpt.yaml").read_text()
    job = "command: [train.py, --max-steps, '1000000']\nmin_nodes: 2\nmax_nodes: 4\n"
    (user / "gpt.yaml").write_text(job)
    shell.run(*next_run("unicron submit gpt.yaml"))
    until("all workers", lambda: members() == 3, 100)
    for command in {replaced(command, CLUSTER[str(longest(command))]): command for command in waiting}.values():
        if longest(command) == "unicron inject":
            until("all workers", lambda: members() == 3, 100)
        shell.run(command, CLUSTER[str(longest(command))])
