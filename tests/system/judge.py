"""Judges a finished run against the failure-free one: samples, repeated work, losses, parameters, counters."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy
from system.cluster import SCRIPT, Note, Notes

MOST_DIFFERENCE = {"float64": 1e-11, "float32": 1e-6, "bf16-mixed": 2e-2, "16-mixed": 2e-3}
"""Allowed difference of parameters, by precision. In float64 rounding is about 1e-14; a miscounted sample
causes more.
"""


class Reference:
    """The same script in a world of one without failures, with states at each epoch's end; extended on demand."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], epochs: int) -> None:
        self._folder, self._settings = folder, settings
        self.most_difference = MOST_DIFFERENCE[settings["precision"] or settings["dtype"]]
        self._epochs = 0
        self._run(epochs)

    def state(self, epochs: int) -> dict[str, numpy.ndarray]:
        """Parameters, buffers, metrics and learning rate after a number of epochs."""
        self._grow(epochs)
        with numpy.load(self._folder / f"epochs-{epochs}.npz") as file:
            return dict(file)

    def steps(self, epochs: int) -> list[Note]:
        """The finished steps of a number of epochs."""
        self._grow(epochs)
        return [line for line in Notes(self._folder)("step") if line["data_epoch"] < epochs]

    def _grow(self, epochs: int) -> None:
        if epochs > self._epochs:
            self._run(2 * epochs)

    def _run(self, epochs: int) -> None:
        for path in [*self._folder.glob("notes-*"), *self._folder.glob("epochs-*")]:
            path.unlink()
        self._folder.mkdir(exist_ok=True)
        (self._folder / "settings.json").write_text(json.dumps({**self._settings, "epochs": epochs}))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(SCRIPT), str(self._folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        self._epochs = epochs


def check_exact(
    folder: Path, reference: Reference, *, workers: int, left_out: Mapping[int, float] | None = None
) -> dict[str, float]:
    """Check every guarantee for a finished run; return the greatest differences.

    Args:
        folder: of the run.
        reference: with the same settings.
        workers: number of workers that must have finished.
        left_out: times from which processes counted as lost while they were still running.
    """
    notes = Notes(folder)
    ends = notes("end")
    assert len(ends) == workers, f"{len(ends)} workers came to the end: {ends}"
    assert len({(end["step"], end["data_epoch"]) for end in ends}) == 1, ends
    epochs = ends[0]["data_epoch"]
    expected = reference.steps(epochs)
    assert ends[0]["step"] == len(expected)
    check_samples(notes.all(), expected)
    check_no_work_twice(notes.all(), left_out or {})
    worst = {"loss": _check_losses(notes("step"), expected), **_check_state(folder, ends, reference.state(epochs))}
    for kind, difference in worst.items():
        most = reference.most_difference * (1 if kind == "parameters" else 10)
        assert difference <= most, f"{kind} differ by {difference} from the failure-free run's"
    return worst


def last_life(lines: Iterable[Note]) -> dict[int, int]:
    """The life whose result counts for each step: a new life resumes from a checkpoint and repeats later steps."""
    lives: dict[int, int] = {}
    for line in lines:
        lives[line["step"]] = max(line["life"], lives.get(line["step"], 0))
    return lives


def _that_count(notes: list[Note]) -> list[Note]:
    """The finished steps, without the last step of an unfinished worker if a later epoch repeated it."""
    steps = [line for line in notes if line["what"] == "step"]
    ended = {line["pid"] for line in notes if line["what"] == "end"}
    last: dict[int, int] = {}
    by_step: dict[tuple[int, int], list[Note]] = defaultdict(list)
    for line in steps:
        last[line["pid"]] = max(line["step"], last.get(line["pid"], 0))
        by_step[line["step"], line["life"]].append(line)
    return [
        line
        for line in steps
        if line["pid"] in ended
        or line["step"] < last[line["pid"]]
        or not any(
            other["epoch"] > line["epoch"] and any(ids in other["ids"] for ids in line["ids"])
            for other in by_step[line["step"], line["life"]]
        )
    ]


def check_samples(notes: list[Note], expected: list[Note]) -> None:
    """Zero lost, zero repeated: each step used exactly its own samples, each once.

    Micro-batches computed by ranks that finished the step count once each. The others must have been finished by a
    worker that died in the step, after its part had been reduced. If a worker was the first to finish a step, and died
    before any other had, its result was lost with it, and the others' counts.
    """
    steps = _that_count(notes)
    lives = last_life(steps)
    used: dict[int, Counter[tuple[int, ...]]] = defaultdict(Counter)
    finished: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for line in steps:
        if line["life"] == lives[line["step"]]:
            used[line["step"]].update(tuple(ids) for ids in line["ids"])
    for line in notes:
        if line["what"] == "computed" and line["life"] == lives.get(line["step"]):
            finished[line["step"]].add(tuple(line["ids"]))
    for line in expected:
        step, wanted = line["step"], {tuple(ids) for ids in line["ids"]}
        repeated = {ids: n for ids, n in used[step].items() if n > 1}
        assert not repeated, f"step {step} used {repeated} more than once"
        assert set(used[step]) <= wanted, f"step {step} used {set(used[step]) - wanted}, which are not of it"
        lost = wanted - set(used[step]) - finished[step]
        assert not lost, f"step {step} never used {lost}"
    for epoch in {line["data_epoch"] for line in expected}:
        ids = sorted(i for line in expected if line["data_epoch"] == epoch for batch in line["ids"] for i in batch)
        assert ids == list(range(len(ids))), f"the samples of epoch {epoch} are not each there once"


def check_no_work_twice(notes: list[Note], left_out: Mapping[int, float]) -> None:
    """A micro-batch is recomputed only if the worker that had finished it has died or was left out."""
    last_seen: dict[int, float] = defaultdict(float)
    for line in notes:
        last_seen[line["pid"]] = max(last_seen[line["pid"]], line["at"])
    for pid, at in left_out.items():
        last_seen[pid] = min(last_seen[pid], at)
    by_place: dict[tuple[int, int, tuple[int, ...]], list[Note]] = defaultdict(list)
    for line in notes:
        if line["what"] == "computed":
            by_place[line["life"], line["step"], tuple(line["ids"])].append(line)
    for (_, step, ids), lines in by_place.items():
        lines.sort(key=lambda line: float(line["at"]))
        for line, again in itertools.pairwise(lines):
            alive = last_seen[line["pid"]] >= again["at"]
            assert not alive, f"step {step}: {ids}, finished by live {line['pid']}, was computed again: {again}"


def _check_losses(steps: list[Note], expected: list[Note]) -> float:
    """Every rank logged every step's loss as in the failure-free run."""
    wanted = {line["step"]: line for line in expected}
    lives = last_life(steps)
    worst = 0.0
    for line in steps:
        if line["life"] == lives[line["step"]]:
            for name in ("loss", "logged"):
                worst = max(worst, abs(line[name] - wanted[line["step"]][name]))
            assert line["data_epoch"] == wanted[line["step"]]["data_epoch"]
    assert {line["step"] for line in steps} == set(wanted)
    return worst


def _check_state(folder: Path, ends: list[Note], wanted: dict[str, numpy.ndarray]) -> dict[str, float]:
    states = []
    for end in ends:
        with numpy.load(folder / f"final-{end['pid']}.npz") as file:
            states.append(dict(file))
    worst = {"parameters": 0.0, "metrics": 0.0}
    for state in states:
        assert state.keys() == wanted.keys(), sorted(state.keys() ^ wanted.keys())
        for name, value in state.items():
            assert value.tobytes() == states[0][name].tobytes(), f"{name} differs between ranks"
            kind = "metrics" if name.startswith("metric/") else "parameters"
            worst[kind] = max(worst[kind], float(abs(value.astype("f8") - wanted[name].astype("f8")).max()))
    return worst
