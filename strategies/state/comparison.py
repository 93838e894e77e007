"""Comparison of the properties that all workers of a task must share: model, optimizer, settings, versions and data
order.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import lightning.pytorch as pl
import torch

from unicron_lightning import __version__
from unicron_lightning.data.combined_loader import CombinedSteps
from unicron_lightning.data.loader import IndexedSteps, StepLoader, TrainingLoader
from unicron_lightning.data.stream_loader import StreamLoader
from unicron_lightning.worker import codec
from unicron_lightning.worker.agreement import check_agreement, digest
from unicron_lightning.worker.operations import Agreement, unpack_parts

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy

_OF_EARLIER_FITS: Final = ("requires_grad", "optimizer", "scheduler", "hparams")
"""Items that an earlier ``fit`` may have changed, which a joiner has left out: it gets them from the members."""
_OF_SCHEDULERS: Final = ("base_lrs", "last_epoch", "_step_count", "_last_lr")
"""State of each of torch's schedulers."""
_PLAIN: Final = (bool, int, float, str, type(None))


class Comparison:
    """This worker's description of itself, and its comparison with those of the others.

    Args:
        strategy: provides the engine.
        active: whether workers are compared at all.

    Attributes:
        described: empty if they are not.
    """

    def __init__(self, strategy: FaultTolerantStrategy, *, active: bool) -> None:
        self._strategy = strategy
        self._active = active
        self.described: dict[str, str] = {}

    def begin(self, trainer: pl.Trainer) -> None:
        """Describe the model of a ``fit``."""
        self.described = describe_model(trainer) if self._active else {}

    @property
    def has_data(self) -> bool:
        """Whether the training data are described, if workers are compared."""
        return "data order" in self.described or not self._active

    def add_data(self, loader: StepLoader | CombinedSteps | None) -> None:
        """Add the training data to the description."""
        if self._active and loader is not None:
            self.described = {**self.described, **describe_data(loader)}

    def agree(self, name: str) -> None:
        """Compare with the other workers, once all have arrived.

        Raises:
            WorkersDiffer: if this worker differs.
        """
        if not self._active:
            return
        said = self._strategy.engine.run(Agreement(f"agree on {name}", lambda rank: codec.encode(self.described)))
        check_agreement(self.described, [codec.decode(part) for part in unpack_parts(said)], node=self._node())

    def check(self, expected: dict[str, str] | None) -> None:
        """Compare with the description of a worker that has the state.

        Raises:
            WorkersDiffer: if this worker differs.
        """
        if self._active and expected:
            left = _OF_EARLIER_FITS if self._strategy.session.fits > 1 else ()
            mine, theirs = ({k: v for k, v in each.items() if k not in left} for each in (self.described, expected))
            check_agreement(mine, [theirs], node=self._node())

    def _node(self) -> str:
        world = self._strategy.engine.world
        return world.nodes[world.rank] if world.nodes else "local"


def describe_model(trainer: pl.Trainer) -> dict[str, str]:
    """Describe the model when the optimizers exist and before anything is restored."""
    module = trainer.lightning_module
    named = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    versions = (torch.__version__, pl.__version__, __version__)
    return {
        "versions": "torch {}, lightning {}, unicron-lightning {}".format(*(v.partition("+")[0] for v in versions)),
        "seed": os.environ.get("PL_GLOBAL_SEED", "not set"),
        "parameters": f"{len(named)}, digest of names, shapes and dtypes {digest(named)}",
        "requires_grad": f"False for {len(frozen)} parameters, digest of their names {digest(frozen)}",
        "optimizer": ", ".join(_optimizer(each) for each in trainer.optimizers),
        "scheduler": ", ".join(
            f"{type(config.scheduler).__qualname__}({_text(shared_state(config.scheduler))}) per {config.interval}"
            for config in trainer.lr_scheduler_configs
        ),
        "hparams": _text(dict(module.hparams)),
    }


def shared_state(scheduler: Any) -> dict[str, Any]:
    """Return the items of a scheduler's state that must be equal on all ranks; a script's class may have others.

    Of torch's classes it is all of it. Of another one it is what torch's `LRScheduler` has, the arguments of the
    constructors, and whole numbers and texts. Paths, objects, and further floats such as times may be of the rank: a
    difference that matters shows in the rates.
    """
    state, kind = scheduler.state_dict(), type(scheduler)
    if not isinstance(state, Mapping):
        return {}
    items = {str(key): value for key, value in state.items()}
    if kind.__module__.startswith(("torch.", "lightning.")):
        return items
    made = [vars(each)["__init__"] for each in kind.__mro__[:-1] if "__init__" in vars(each)]
    known = {*_OF_SCHEDULERS, *(name for each in made for name in inspect.signature(each).parameters)}
    return {key: value for key, value in items.items() if _is_shared(value, (int, float) if key in known else (int,))}


def _is_shared(value: Any, numbers: tuple[type, ...]) -> bool:
    """Whether a value consists of such numbers, and of texts that are no paths."""
    if isinstance(value, Mapping):
        return all(_is_shared(each, numbers) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple)):
        return all(_is_shared(each, numbers) for each in value)
    if isinstance(value, torch.Tensor):
        return float in numbers or not value.is_floating_point()
    return isinstance(value, numbers) or (isinstance(value, str) and os.sep not in value)


def describe_data(loader: StepLoader | CombinedSteps) -> dict[str, str]:
    """Describe length and order of the training data, by the first step and a later one that is equal on all
    workers; of a stream, by its first batch.
    """
    stream = loader.stream if isinstance(loader, CombinedSteps) else loader
    if isinstance(stream, StreamLoader):
        return {"data order": f"digest of the first batch {digest([_content(stream.first())])}"}
    assert isinstance(loader, TrainingLoader | CombinedSteps)
    steps = loader.steps.number(0)
    later = random.Random(steps).randrange(steps) if steps else 0
    orders = [(step, loader.steps.samples(step)) for step in dict.fromkeys((0, later)) if step < steps]
    datasets = [part.dataset for part in (loader.flattened if isinstance(loader, CombinedSteps) else [loader])]
    return {
        "data length": f"{' + '.join(map(_length, datasets))} samples, {steps} steps an epoch{_schedule(loader.steps)}",
        "data order": f"digest of the samples of steps {[step for step, _ in orders]} {digest(orders)}",
    }


def _schedule(steps: IndexedSteps) -> str:
    epochs = steps.shape.schedule
    return f", with schedule of accumulate_grad_batches {dict(epochs)}" if epochs else ""


def _content(batch: Any) -> object:
    try:
        return codec.encode(batch)
    except codec.NotPlainData:
        return batch


def _length(data: object) -> str:
    try:
        return str(len(data))  # type: ignore[arg-type]
    except TypeError:
        return "?"


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    return f"{type(optimizer).__qualname__}({'; '.join(_text(group) for group in groups)})"


def _text(values: Mapping[str, Any] | None) -> str:
    """Return a text of a state; a scheduler may have none."""
    return "" if values is None else ", ".join(f"{key}={value}" for key, value in sorted(_plain(values)))


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Select numbers and texts, and lists of them: paths may differ between nodes, and objects have no stable text."""
    for key, value in values.items():
        item = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if isinstance(item, str) and os.sep in item:
            continue
        if isinstance(item, _PLAIN) or (
            isinstance(item, list | tuple) and all(isinstance(each, _PLAIN) for each in item)
        ):
            yield str(key), repr(item)
