"""The user's data loaders, wrapped for training, evaluation and prediction.

Lightning's loops iterate over the strategy's loaders, and each iteration is a step or a pass of the task.
``trainer.val_dataloaders`` and similar properties return the loader that Lightning would have made under ddp instead
(`ordinary`): a callback may iterate over it, or read its attributes, without any effect on training.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

import lightning.pytorch as pl
from lightning.pytorch.loops import _EvaluationLoop
from lightning.pytorch.trainer.connectors.data_connector import (
    _DataLoaderSource,
    _get_distributed_sampler,
    _worker_check,
)
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _shutdown_workers_and_reset_iterator
from lightning.pytorch.utilities.data import _is_dataloader_shuffled, _update_dataloader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from typing_extensions import override

from unicron_lightning import environ
from unicron_lightning.copying import replace_method
from unicron_lightning.data.combined import Combined, CombinedOpener, CombinedPass, CombinedSteps, PartLoader
from unicron_lightning.data.fetch import Fetcher
from unicron_lightning.data.loader import GlobalBatch, InPlace
from unicron_lightning.data.order import DataOrder, StepShape, check_loader
from unicron_lightning.data.passes import EvaluationLoader, IndexedBatches, PassBatches, StreamBatches
from unicron_lightning.data.seeding import RandomPurpose, seeded
from unicron_lightning.data.sources import Batches, as_loader
from unicron_lightning.data.steps import (
    IndexedSteps,
    PassLoader,
    SingleReading,
    StepPace,
    Steps,
    StreamPass,
    StreamSteps,
    TrainingLoader,
    agree_on_ends,
    indexed_pass,
    most_of,
)
from unicron_lightning.data.streams import StreamEnds, StreamOpener, Streams
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.passes.prediction import PredictionLoader, Predictions, unwrapped

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy

logger = logging.getLogger(__name__)

_BEFORE_TRANSFER: Final = "_on_before_batch_transfer"

Made = TrainingLoader | PartLoader | EvaluationLoader | PassLoader


def _leave_global(own: Callable[..., Any], batch: Any, dataloader_idx: int = 0) -> Any:
    """Leave global batches as they are before the transfer: their samples follow in each micro-batch."""
    return batch if isinstance(batch, GlobalBatch) else own(batch, dataloader_idx)


class Loaders:
    """Wraps loaders for Lightning, and ends their worker processes.

    Args:
        strategy: provides world, parallelism and boundary.
    """

    def __init__(self, strategy: FaultTolerantStrategy) -> None:
        self._strategy = strategy
        self._trainer: pl.Trainer | None = None
        self._samples = True
        """Whether Lightning would make samplers, which the user can switch off."""
        self._predictions: Predictions | None = None
        self._made: list[Made] = []
        self._combined: CombinedSteps | None = None
        """The present training data, if it has several loaders."""
        self._together: CombinedPass | None = None
        """The present evaluation data, if several loaders are read at once."""
        self._noted: set[tuple[str | None, str]] = set()
        """Stages and classes of data of which the log has that it is read once."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy has made no loaders yet."""
        return {**vars(self), "_made": [], "_predictions": None, "_combined": None, "_together": None}

    def attend(self, trainer: pl.Trainer) -> None:
        """Replace the samplers that Lightning would make for this trainer, if it would."""
        if trainer is not self._trainer:
            self._trainer = trainer
            self._samples = trainer._accelerator_connector.use_distributed_sampler
        trainer._accelerator_connector.use_distributed_sampler = False
        sources = (trainer.lightning_module, getattr(trainer, "datamodule", None))
        if any(is_overridden("on_before_batch_transfer", source) for source in sources):
            replace_method(trainer.lightning_module, _BEFORE_TRANSFER, _leave_global)
        source = trainer.fit_loop._data_source
        trainer.fit_loop._data_source = CombiningSource(source.instance, source.name, partial(self._combine, trainer))
        for loop in evaluation_loops(trainer):
            source = loop._data_source
            loop._data_source = CombiningSource(source.instance, source.name, partial(self._combine_pass, trainer))

    def wrap(self, trainer: pl.Trainer, users: object) -> object:
        """Return the loader for the loop of the trainer's present stage, instead of the user's.

        Raises:
            ConfigError: for loaders that can't be distributed.
        """
        if isinstance(users, DataLoader):  # Lightning looks at what it gets, which is no `DataLoader`
            assert trainer.state.stage is not None
            _worker_check(trainer, users, f"{trainer.state.stage.dataloader_prefix}_dataloader")
        shape, seed = self._strategy.shape, self._strategy.seed
        loader = as_loader(users, shape.devices, once=self._once)
        if self._once and isinstance(users, Iterator):
            self._note(users, trainer)
        is_users = loader is users
        combined = self._combined if trainer.training else None if trainer.predicting else self._together
        check_loader(loader)
        made: Made
        if combined is not None:
            if trainer.training:
                self._strategy.parallelism.steps.check_data(loader)
            made = PartLoader(loader, self._part_order(trainer, loader), seed, once=self._once)
        elif trainer.training:
            self._strategy.parallelism.steps.check_data(loader)
            made = TrainingLoader(loader, self._training(trainer, loader))
        elif trainer.predicting:
            if self._predictions is None:
                self._predictions = self._strategy.parallelism.predictions(trainer, self._strategy.engine)
            loader = unwrapped(loader)
            made = PredictionLoader(loader, self.pass_batches(loader, seed), self._predictions)
        else:
            made = self._strategy.parallelism.evaluation.loader(trainer, loader)
        if not is_users or (trainer.predicting and not self._samples):
            made.ordinary = users
        elif self._samples and not isinstance(made, PassLoader) and not isinstance(loader.dataset, IterableDataset):
            made.ordinary = ordinary(trainer, loader, shape.devices, self._strategy.global_rank)
        if isinstance(made, TrainingLoader):
            self._strategy.schedule.attend(trainer, made, shape, made)
        elif isinstance(combined, CombinedSteps) and users is combined.flattened[0]:
            self._strategy.schedule.attend(trainer, combined, shape, made)
        self._keep(trainer, made)
        return made

    def _keep(self, trainer: pl.Trainer, made: Made) -> None:
        """Remember a loader for Lightning's loops."""
        if isinstance(made, EvaluationLoader | PassLoader):
            made.iterates = self._iterates
        made.taken = partial(show_ordinary, trainer)
        self._made.append(made)

    def pass_batches(self, source: DataLoader[Any] | CombinedPass, shuffle_seed: int) -> PassBatches:
        """Return the batches of a pass, for workers that each hold the whole model.

        Args:
            source: the user's loader, or several that are read at once.
            shuffle_seed: of the order of a loader's data with an index. Augmentation and streams' random state have the
                strategy's seed, which is equal on all members, also if the script's seeds differ.
        """
        seed, devices = self._strategy.seed, self._strategy.shape.devices
        is_stream = source.streams if isinstance(source, CombinedPass) else isinstance(source.dataset, IterableDataset)
        if is_stream:
            return StreamBatches(self._opener(source, seed), devices, self._reading)
        if isinstance(source, CombinedPass):
            together = source.order()
            return IndexedBatches(together, partial(source.fetchers, together))
        order = DataOrder(source, self._rounds, shuffle_seed)
        return IndexedBatches(order, partial(Fetcher, source, order, seed))

    @property
    def _rounds(self) -> StepShape:
        """Shape of the rounds over the declared devices."""
        return StepShape(devices=self._strategy.shape.devices, accumulation=1)

    @property
    def _once(self) -> bool:
        """Whether nothing is ever read again: without an agent there are no failures to recover from.

        Several declared devices have a stream each, which one iterator can't be.
        """
        strategy = self._strategy
        return not (environ.under_agent() or strategy.shape.devices > 1 or strategy.parallelism.one_size)

    @property
    def training(self) -> TrainingLoader | CombinedSteps | None:
        """The present run's loader of training data."""
        if self._combined is not None:
            return self._combined
        return next((made for made in reversed(self._made) if isinstance(made, TrainingLoader)), None)

    @property
    def steps(self) -> Steps | None:
        """The global batches of the present run's training data."""
        training = self.training
        training = training.whole if isinstance(training, CombinedSteps) else training
        return None if training is None else training.steps

    def committed(self, trainer: pl.Trainer, batch: GlobalBatch) -> None:
        """Mark the last step of an epoch of streams, which is known after its commit, for Lightning."""
        steps = self.steps
        if isinstance(steps, StreamSteps) and steps.is_last(batch):
            trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True

    @contextmanager
    def estimating(self, trainer: pl.Trainer) -> Iterator[None]:
        """Inside, `estimated_stepping_batches` counts the expected steps of a stream that states its length.

        Afterwards the loop has no number of steps again, as the length may be wrong, and each sample is to be used.
        """
        loop: Any = trainer.fit_loop
        set_up, known = loop.setup_data, []

        def estimate() -> None:
            steps = None if isinstance(self.training, CombinedSteps) else self.steps
            if isinstance(steps, StreamSteps) and not isinstance(steps, SingleReading):
                known.append(loop.max_batches)
                loop.max_batches = min(loop.max_batches, steps.expected())

        def set_up_and_estimate() -> None:
            set_up()
            estimate()

        loop.setup_data = set_up_and_estimate
        estimate()
        try:
            yield
        finally:
            del loop.setup_data
            if known:
                loop.max_batches = known[-1]

    def predicting(self) -> AbstractContextManager[None]:
        """Return a context with the random state of the present batch of a prediction."""
        if self._predictions is None:
            return nullcontext()
        return seeded(self._strategy.seed, RandomPurpose.PREDICTION, *self._predictions.place)

    def end_passes(self) -> None:
        """Finish a validation: end worker processes that are not persistent."""
        for loader in self._made:
            if isinstance(loader, PassLoader | EvaluationLoader):
                loader.end()

    def close(self) -> None:
        """Finish the run: end all worker processes."""
        for loader in self._made:
            loader.close()
            _shutdown_workers_and_reset_iterator(loader.ordinary)
        self._made = []
        if self._trainer is not None:
            vars(self._trainer.lightning_module).pop(_BEFORE_TRANSFER, None)
            leave_ordinary(self._trainer)
        self._predictions = self._combined = self._together = None

    def _note(self, users: Iterator[Any], trainer: pl.Trainer) -> None:
        """Log once for each kind of data that it can be read once only."""
        assert trainer.state.stage is not None
        note = trainer.state.stage.dataloader_prefix, type(users).__qualname__
        if note not in self._noted:
            self._noted.add(note)
            logger.warning("read_once loader=%s_dataloader data=%s reason=refused under torchrun", *note)

    def _combine(self, trainer: pl.Trainer, users: Any) -> Any:
        """Return training data as Lightning's loop is to get it: several loaders as one that yields steps."""
        several = users if isinstance(users, CombinedLoader) else CombinedLoader(users, "max_size_cycle")
        self._combined = None
        if len(several.flattened) == 0 or several.iterables is several.flattened[0]:
            return users
        self._combined = CombinedSteps(several, self._strategy.shape, partial(self._whole_steps, trainer))
        return self._combined

    def _combine_pass(self, trainer: pl.Trainer, users: Any) -> Any:
        """Return evaluation data as Lightning's loop is to get it: loaders that are read at once as one."""
        self._together = None
        if isinstance(users, CombinedLoader) and users._mode != "sequential":
            self._together = CombinedPass(users, self._rounds, partial(self._whole_pass, trainer))
        return users if self._together is None else self._together

    def _whole_pass(self, trainer: pl.Trainer, combined: CombinedPass) -> EvaluationLoader:
        made: EvaluationLoader = self._strategy.parallelism.evaluation.together(combined)
        self._keep(trainer, made)
        return made

    def _whole_steps(self, trainer: pl.Trainer, combined: CombinedSteps) -> TrainingLoader:
        most = combined.most
        if combined.streams:
            opener = self._opener(combined, order_seed())
            steps = self._streamed(trainer, opener, None if math.isinf(most) else int(most))
            made = TrainingLoader(opener.loader, steps)
        else:
            order = combined.order(most)
            first, _ = combined.parts[0].opened()
            made = TrainingLoader(first, IndexedSteps(order, partial(combined.fetchers, order), self._pace(trainer)))
        self._keep(trainer, made)
        return made

    def _pace(self, trainer: pl.Trainer) -> StepPace:
        """Return the pace of training."""
        strategy, activity = self._strategy, self._strategy.engine.activity
        return StepPace(
            position=partial(_position, trainer),
            share=strategy.share,
            boundary=partial(strategy.boundary, trainer),
            ended=partial(activity.enter, "epoch_end"),
        )

    def _order(self, trainer: pl.Trainer, loader: DataLoader[Any], shape: StepShape) -> DataOrder:
        """Return the order of training data, shuffled as under ddp; a sequence of batches keeps its own."""
        shuffle = self._strategy.parallelism.shuffles and self._samples and not trainer.overfit_batches  # type: ignore[attr-defined]
        return DataOrder(loader, shape, order_seed(), shuffle and not isinstance(loader.dataset, Batches))

    def _part_order(self, trainer: pl.Trainer, loader: DataLoader[Any]) -> DataOrder | None:
        """Return the order of one of several loaders that are read at once; None for a stream."""
        if isinstance(loader.dataset, IterableDataset):
            return None
        rounds = self._rounds
        return self._order(trainer, loader, rounds) if trainer.training else DataOrder(loader, rounds, order_seed())

    def _training(self, trainer: pl.Trainer, loader: DataLoader[Any]) -> Steps:
        strategy = self._strategy
        limit = trainer.limit_train_batches if isinstance(trainer.limit_train_batches, int) else None
        if isinstance(loader.dataset, IterableDataset):
            return self._streamed(trainer, self._opener(loader, order_seed()), limit)
        order = self._order(trainer, loader, strategy.shape)
        most = math.inf if limit is None else limit
        return IndexedSteps(order, partial(Fetcher, loader, order, strategy.seed), self._pace(trainer), lambda: most)

    def _streamed(self, trainer: pl.Trainer, opener: StreamOpener, limit: int | None) -> StreamSteps:
        """Return the steps of streams in training."""
        strategy = self._strategy

        def fetcher() -> Any:
            return trainer.fit_loop._data_fetcher

        def begins() -> None:
            # Reading ahead is done by the streams; Lightning's own would begin a step before the last one ends.
            fetcher().prefetch_batches = 0

        def last() -> None:
            fetcher().done = True

        streams = Streams(opener, strategy.shape, strategy.agreed.streams, one_size=strategy.parallelism.one_size)
        made = partial(SingleReading, last=last) if opener.once else StreamSteps
        return made(streams, self._pace(trainer), limit=limit, begins=begins, **self._agreed)

    def global_pass(self, trainer: pl.Trainer, loader: DataLoader[Any], limit: int | float) -> PassLoader:
        """Return a loader of an evaluation in global batches, for workers that hold the model together.

        Args:
            trainer: runs it.
            loader: the user's.
            limit: Lightning's: largest number of batches of each device, or a fraction of them.
        """
        strategy = self._strategy
        # All data epochs have global batches of one size, as their number is Lightning's limit.
        shape = StepShape(devices=strategy.shape.devices, accumulation=strategy.shape.accumulation)
        share, one_size = strategy.share, strategy.parallelism.one_size

        def epoch() -> int:
            return trainer.current_epoch

        if not isinstance(loader.dataset, IterableDataset):
            most = limit if isinstance(limit, int) else math.inf
            return indexed_pass(loader, shape, strategy.seed, most, partial(_sanity_limit, trainer), share, epoch)
        opener = self._opener(loader, strategy.seed)
        steps = partial(
            StreamPass,
            Streams(opener, shape, StreamEnds(), one_size=one_size, sets_epoch=False),
            most=lambda: min(most_of(limit, opener.length(), shape), _sanity_limit(trainer)),
            takes_part=lambda: strategy.engine.has_state,
            **self._agreed,
        )

        def length() -> int | None:
            number = opener.length()
            return None if number is None else shape.steps(number)

        return PassLoader(loader, steps, share, epoch, length)

    @property
    def _agreed(self) -> dict[str, Any]:
        """How the steps of streams become known to all ranks."""
        agree = partial(agree_on_ends, self._strategy.engine)
        return {"own": self._strategy.parallelism.own, "agree": agree, "reading": self._reading}

    def _opener(self, source: DataLoader[Any] | Combined[Any], seed: int) -> StreamOpener:
        devices = self._strategy.shape.devices
        options = (devices, seed, partial(self._strategy.seen_as, size=devices))
        if isinstance(source, DataLoader):
            return StreamOpener(source, *options, once=self._once)
        parts = [part.opened() for part in source.parts]
        return CombinedOpener(parts, source.mode, source.structure, *options, once=self._once)

    def _reading(self) -> AbstractContextManager[None]:
        return self._strategy.engine.activity.during("data")

    def _iterates(self) -> None:
        """Give the streams of evaluations a bound as their length, as Lightning has begun to iterate."""
        for loader in self._made:
            if isinstance(loader, EvaluationLoader | PassLoader):
                loader.unbounded = True


class CombiningSource(_DataLoaderSource):
    """Lightning's source of data, which combines several loaders.

    Args:
        instance, name: of Lightning's source.
        combine: takes what the user gave; returns what Lightning's loop is to get.
    """

    def __init__(self, instance: Any, name: str, combine: Callable[[Any], Any]) -> None:
        super().__init__(instance, name)
        self._combine = combine

    @override
    def dataloader(self) -> Any:
        return self._combine(super().dataloader())

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """A copy is Lightning's, as this object belongs to a run."""
        return _DataLoaderSource, (self.instance, self.name)


def _sanity_limit(trainer: pl.Trainer) -> float:
    return trainer.num_sanity_val_steps if trainer.sanity_checking else math.inf


def _position(trainer: pl.Trainer) -> tuple[int, int]:
    """Return the present epoch and the step within it, from Lightning's counters."""
    loop = trainer.fit_loop
    epoch: Any = loop.epoch_progress.current
    return epoch.processed, loop.epoch_loop.batch_progress.current.ready


def order_seed() -> int:
    """Return the seed of Lightning's samplers under ddp."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


_LIGHTNINGS: Final[Any] = pl.Trainer.estimated_stepping_batches


def estimated_steps(trainer: pl.Trainer) -> float:
    """Return `Trainer.estimated_stepping_batches`; with a strategy of this project, a stream's stated steps count.

    Raises:
        ConfigError: nothing limits the steps, so that Lightning gives -1.
    """
    loaders = getattr(trainer.strategy, "loaders", None)
    if not isinstance(loaders, Loaders):
        own: float = _LIGHTNINGS.fget(trainer)
        return own
    with loaders.estimating(trainer):
        found: float = _LIGHTNINGS.fget(trainer)
    if found == -1 and loaders.training is not None:  # otherwise there is no data yet
        raise ConfigError(
            "trainer.estimated_stepping_batches: the training data is iterable without a length, and so the number of "
            "steps is not known; set Trainer(max_steps=...) or Trainer(limit_train_batches=...)"
        )
    return found


def install_estimates() -> None:
    """Have trainers give this estimate, wherever a script asks for it."""
    pl.Trainer.estimated_stepping_batches = property(estimated_steps, doc=_LIGHTNINGS.__doc__)  # type: ignore[method-assign,assignment]


_STAGES: Final = {
    "train": RunningStage.TRAINING,
    "val": RunningStage.VALIDATING,
    "test": RunningStage.TESTING,
    "predict": RunningStage.PREDICTING,
}
"""By the prefix of their methods for data."""


def ordinary(trainer: pl.Trainer, loader: DataLoader[Any], devices: int, rank: int) -> DataLoader[Any]:
    """Return the loader of one device of the declared world, as under ddp; the user's own if that can't be made.

    Args:
        trainer: provides the present stage.
        loader: the user's loader.
        devices: devices of the declared world.
        rank: this worker's rank when the loader is made.
    """
    if isinstance(loader.sampler, DistributedSampler):
        return loader
    stage = trainer.state.stage
    assert stage is not None
    overfits: float = trainer.overfit_batches  # type: ignore[attr-defined]
    shuffled = stage == RunningStage.TRAINING or _is_dataloader_shuffled(loader)
    try:
        sampler = _get_distributed_sampler(loader, shuffled, overfits, stage, num_replicas=devices, rank=rank % devices)
        made: DataLoader[Any] = _update_dataloader(loader, sampler, mode=stage)
    except (MisconfigurationException, TypeError, AssertionError):  # unknown arguments; fewer samples than devices
        return loader
    return made


@contextmanager
def loading(trainer: pl.Trainer, prefix: str) -> Iterator[None]:
    """Inside, the trainer is in the stage whose data is loaded: searches load validation data while they train.

    Args:
        trainer: of the run.
        prefix: of the stage's method, such as ``val``; "" if unknown.
    """
    before = trainer.state.stage
    if before is not None and before.dataloader_prefix != prefix in _STAGES:
        trainer.state.stage = _STAGES[prefix]
    try:
        yield
    finally:
        trainer.state.stage = before


def evaluation_loops(trainer: pl.Trainer) -> tuple[_EvaluationLoop, ...]:
    """Return all loops of a trainer that run validations or tests."""
    return trainer.validate_loop, trainer.test_loop, trainer.fit_loop.epoch_loop.val_loop


def leave_ordinary(trainer: pl.Trainer) -> None:
    """Leave the ordinary loaders of the training data to the loop after a run: its state has none of the strategy's."""
    combined: CombinedLoader | None = trainer.fit_loop._combined_loader
    if combined is not None:
        leaves = [each.ordinary if isinstance(each, InPlace) else each for each in combined.flattened]
        made = CombinedLoader(tree_unflatten(leaves, combined._spec), combined._mode)
        made.limits = combined.limits
        trainer.fit_loop._combined_loader = made


def show_ordinary(trainer: pl.Trainer) -> None:
    """Make the trainer's properties return the ordinary loaders, while its loops keep those of the strategy."""
    loops: tuple[Any, ...] = trainer.fit_loop, *evaluation_loops(trainer), trainer.predict_loop
    for loop in loops:
        combined: CombinedLoader | None = loop._combined_loader
        if combined is not None:
            leaves = [each.ordinary if isinstance(each, InPlace) else each for each in combined.flattened]
            combined._iterables = tree_unflatten(leaves, combined._spec)
