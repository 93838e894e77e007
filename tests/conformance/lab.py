"""Runs one scenario under one strategy, and records what can be observed of it."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerStatus

UNSEEN = {"on_save_checkpoint", "state_dict", "load_state_dict", "setup_environment"}
"""Hooks that the trace of a trainer leaves out: they have scenarios of their own."""
QUIET = {
    "use_distributed_sampler": False,  # else training data is shuffled, as under ddp
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
OF_PLACE = re.compile(
    "GPU available|TPU available|litlogger|distributed_backend|Initializing distributed|Profiler Report|Seed set to|"
    r"rank \d+ on \S+ was lost"
)
"""Messages about the machine, the start of processes, and a rank whose error another rank notices before its own."""
ONCE = re.compile(
    "FutureWarning|sync_dist=True|Profiler clears events|JsonargparseDeprecation|DeprecationWarning|no accelerator|"
    "Using `DistributedSampler` with"
)
"""Warnings that a library gives once in a process, or that are about the machine, or advice about `sync_dist` or the
samples that ddp repeats."""
TIMES = re.compile("time|per_sec|epoch_duration")
"""Names of values that no two runs have in common."""
Record = dict[str, Any]


class Trace(Callback):
    """Records each hook of a callback, with the trainer's counters at that time.

    Args:
        meet: waits, for a limited time, until an error has ended the run in the world's other processes, too.
    """

    def __init__(self, meet: Callable[[], object]) -> None:
        self.meet = meet
        self.calls: list[list[Any]] = []


def _traced(name: str) -> Callable[..., None]:
    def hook(self: Trace, trainer: pl.Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
        if name == "on_exception":
            self.meet()
        numbers = [each for each in (*args, *kwargs.values()) if isinstance(each, (int, str)) or each is None]
        stage = trainer.state.stage
        self.calls.append(
            [name, trainer.global_step, trainer.current_epoch, None if stage is None else stage.value, *numbers]
        )

    return hook


for _name in [each for each in vars(Callback) if each.startswith(("on_", "setup", "teardown")) and each not in UNSEEN]:
    setattr(Trace, _name, _traced(_name))


class Lab:
    """What a scenario works with.

    Args:
        strategy: of its trainers.
        folder: for its files; empty.
        nodes: number of nodes with one device each.
        meet: waits until the world's other processes have called it as often.
        meet_failed: the same for a limited time, in runs that an error ends: a process leaves its world after it.

    Attributes:
        record: what was seen, by name.
    """

    def __init__(
        self,
        strategy: str,
        folder: Path,
        nodes: int = 1,
        meet: Callable[[], None] = lambda: None,
        meet_failed: Callable[[], object] = lambda: None,
    ) -> None:
        self.strategy = strategy
        self.folder = folder
        self.nodes = nodes
        self.meet = meet
        self._meet_failed = meet_failed
        self.record: Record = {}
        self._trainers: list[tuple[pl.Trainer, Trace]] = []

    def trainer(self, *callbacks: Callback, trace: bool = True, **settings: Any) -> pl.Trainer:
        """Return a quiet trainer with these callbacks and settings, that is traced."""
        given = {"strategy": self.strategy, "accelerator": "cpu", "devices": 1, "num_nodes": self.nodes}
        given |= {"default_root_dir": self.folder, **QUIET}
        if self.nodes > 1:
            given["use_distributed_sampler"] = True
        traced = Trace(self._meet_failed)
        used = [*callbacks, traced] if trace else [*callbacks]
        made = pl.Trainer(callbacks=used or None, **given | settings)
        self._trainers.append((made, traced))
        return made

    def see(self, **facts: Any) -> None:
        """Record facts."""
        for name, fact in facts.items():
            assert name not in self.record, name
            self.record[name] = self.plain(fact)

    def attempt(self, name: str, call: Callable[[], Any]) -> Any:
        """Call, and record the error, which must be raised."""
        try:
            call()
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 (the record is compared)
            self.record[name] = self.error(error)
        else:
            raise AssertionError(f"{name}: expected an error")

    def error(self, error: BaseException) -> Record:
        """Return class, bases and message of an error."""
        bases = [each.__name__ for each in type(error).__mro__[1:]]
        return {"class": type(error).__name__, "bases": bases, "message": self.text(str(error))}

    @property
    def broken_off(self) -> bool:
        """Whether an error has ended a run of a trainer after its start."""
        return any(
            trainer.state.status == TrainerStatus.INTERRUPTED
            and getattr(trainer.strategy, "_session", self) is not None
            for trainer, _ in self._trainers
        )

    def end(self) -> None:
        """Record the state of all trainers."""
        for number, (trainer, trace) in enumerate(self._trainers):
            self.see(**{f"trainer{number}": _described(trainer) | {"hooks": trace.calls}})
        files = [str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()]
        self.see(files=sorted(re.sub(r"events\.out\.tfevents.*", "events", name) for name in files))

    def text(self, text: str) -> str:
        """Return a text without what differs between two runs of the same strategy."""
        text = text.replace(str(self.folder), "FOLDER")
        text = re.sub(r"`(Training|Evaluation|Prediction|Stream)Loader`", "`DataLoader`", text)
        text = re.sub(r"\.(lr_find|scale_batch_size)_[0-9a-f-]+", "SEARCH", text)
        return re.sub(r" at 0x[0-9a-f]+|(?<= )\d+\.\d+ seconds|0x[0-9a-f]+", "", text)

    def plain(self, fact: Any) -> Any:
        """Return a fact as something that can be compared."""
        if isinstance(fact, torch.Tensor):
            return ["tensor", str(fact.dtype), fact.detach().tolist()]
        if isinstance(fact, Mapping):
            return {self.text(str(name)): self.plain(each) for name, each in fact.items()}
        if isinstance(fact, (str, Path)):
            return self.text(str(fact))
        if isinstance(fact, (Sequence, set, frozenset)):
            return [self.plain(each) for each in (sorted(fact) if isinstance(fact, (set, frozenset)) else fact)]
        if fact is None or isinstance(fact, (bool, int, float)):
            return fact
        return self.text(repr(fact)) if type(fact).__repr__ is not object.__repr__ else type(fact).__name__


def _described(trainer: pl.Trainer) -> Record:
    module = getattr(trainer.strategy, "_lightning_module", None)
    state = {} if module is None else module.state_dict()
    lab = Lab("", Path("/nowhere"))
    metrics = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]
    return {
        "state": [trainer.state.status.value, trainer.state.fn and trainer.state.fn.value],
        "stage": trainer.state.stage and trainer.state.stage.value,
        "counters": [trainer.global_step, trainer.current_epoch, trainer.should_stop, trainer.num_training_batches],
        "batches": lab.plain([trainer.num_val_batches, trainer.num_test_batches, trainer.num_sanity_val_batches]),
        "metrics": [
            {name: lab.plain(value) for name, value in each.items() if not TIMES.search(name)} for each in metrics
        ],
        "parameters": lab.plain(dict(state)),
    }


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def observed(lab: Lab) -> Iterator[None]:
    """Record warnings and messages of Lightning's loggers."""
    handler = _Messages()
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = [each.handlers for each in loggers]
        for each in loggers:
            each.handlers = [handler]
        try:
            yield
        finally:
            for each, handlers in zip(loggers, before, strict=True):
                each.handlers = handlers
    warned = {lab.text(f"{each.category.__name__}: {each.message}") for each in caught}
    lab.see(warnings=sorted(each for each in warned if not ONCE.search(each)))
    lab.see(messages=sorted({lab.text(each) for each in handler.messages if not OF_PLACE.search(each)}))
