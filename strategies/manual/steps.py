"""Steps of manual optimization: ``training_step`` of all micro-batches, side by side, through failures.

Under ddp each rank runs ``training_step`` once, and all ranks meet in each backward. Here a rank may have several
micro-batches. Their calls run as `Strand` s, which meet in each `manual_backward`: a *meeting*. Each meeting is an
operation of the protocol, and the end of ``training_step`` is the last one. The optimizers step between meetings, once
on each rank. After a failure the survivors' strands continue, and those of a dead rank are run again from the start of
``training_step``, with the parameters of that time (`ParameterVersions`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.core.optimizer import do_nothing_closure
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.seeding import (
    RandomPurpose,
    kept,
    place_seed,
    random_states,
    restore_random_states,
    seed_all,
    seeded,
)
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.manual.strand import END, MeetingPlace, Strand, StrandStates
from unicron_lightning.strategies.metrics.recording import Recording
from unicron_lightning.strategies.parallelism import FinishedStep
from unicron_lightning.strategies.state.comparison import further_state
from unicron_lightning.worker.agreement import NO_DIGEST, StateDigest
from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.comparison import Divergence
from unicron_lightning.worker.effects import Effects
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.exact_sums import step_sums
from unicron_lightning.worker.model_state import in_order_of
from unicron_lightning.worker.module_buffers import ModuleBuffers
from unicron_lightning.worker.rows import plan_rows
from unicron_lightning.worker.step import GradientStep, Sums
from unicron_lightning.worker.sums import NormStatistics, StepSums, SumsLayout
from unicron_lightning.worker.witness import WitnessedStep

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy


class _RankStrands(msgspec.Struct):
    """A rank's strands, by micro-batch, and the meeting to which they have come."""

    strands: list[int]
    meeting: str


class MeetingStep(GradientStep):
    """The micro-batches' backwards of one meeting, up to their commit.

    A micro-batch belongs to the lowest rank that has its strand; those without one, of a dead rank, are distributed.

    Args:
        micro_batches: all of the step's, by number.
        gradients: of the meeting.
        sums: of the meeting.
        run: brings one micro-batch through the meeting.
        strands: numbers of the strands on this rank; changes with ``run``.
        meeting: what this rank's strands have come to.
        place: for errors.
        digest: of the state before the step.
        witness: as of `GradientStep`.
    """

    def __init__(
        self,
        micro_batches: Sequence[int],
        gradients: GradientBuckets,
        sums: Sums,
        run: Callable[[int], None],
        *,
        strands: Collection[int],
        meeting: MeetingPlace,
        place: str,
        digest: StateDigest = NO_DIGEST,
        witness: WitnessedStep | None = None,
    ) -> None:
        super().__init__(micro_batches, gradients, sums, run, digest=digest, witness=witness)
        self._strands = strands
        self._meeting = meeting
        self._place = place

    @property
    def finished(self) -> frozenset[int]:
        """Micro-batches that this rank has brought through the meeting."""
        return frozenset(self._finished)

    def attempt(self, engine: Engine) -> bytes:
        plan = self._plan
        assert plan is not None
        self._plan = replace(plan, todo=tuple(self._own(engine, plan.lost)))
        return super().attempt(engine)

    def _own(self, engine: Engine, lost: Sequence[int]) -> list[int]:
        own = _RankStrands(strands=sorted(self._strands), meeting=described(self._meeting))
        standing = msgspec.msgpack.encode(own)
        parts = gather_bytes(engine.communicator, standing, engine.tag("meeting"))
        ranks = [msgspec.msgpack.decode(part, type=_RankStrands) for part in parts]
        check_same([each.meeting for each in ranks], self._place)
        owners = {number: rank for rank, each in reversed(list(enumerate(ranks))) for number in each.strands}
        world = engine.world

        def share(rank: int) -> list[int]:
            orphans = plan_rows(lost, owners, rank, world.size)
            return sorted([*orphans.rows, *(number for number in lost if owners.get(number) == rank)])

        if self._witness is not None and len(lost) == len(self.micro_batches):  # none has come through the meeting
            self._witness.plan(world.rank, world.size, share)
        return share(world.rank)


def described(meeting: MeetingPlace) -> str:
    """Return a meeting as text that is equal for equal meetings."""
    return "end" if meeting.mask is None else "".join("01"[needed] for needed in meeting.mask)


def check_same(meetings: Sequence[str], place: str) -> None:
    """Refuse micro-batches that call their backwards in different orders.

    Args:
        meetings: as `described` returns them.
        place: for the message.

    Raises:
        ConfigError: quoting the meetings.
    """
    if len(set(meetings)) > 1:
        found = [
            "its end"
            if meeting == "end"
            else f"manual_backward() with {meeting.count('1')} parameters that need gradients"
            for meeting in sorted(set(meetings))
        ]
        raise ConfigError(
            f"{place}: micro-batches of one step have come to {' and to '.join(found)}; the unicron strategy needs the "
            "same manual_backward, toggle_optimizer and optimizer.step calls for all micro-batches of a step: let them "
            "depend on batch_idx, not on the data"
        )


class ParameterVersions:
    """Copies of parameters, made before each optimizer step; version v precedes the v-th one.

    A strand that is behind the others, because its rank has several micro-batches or replaces a dead one, continues
    with the parameters that its micro-batch has seen in the first place.

    Memory: one copy of an optimizer's parameters for each of its steps within one ``training_step``.

    Attributes:
        newest: number of optimizer steps so far.
    """

    def __init__(self) -> None:
        self._live: dict[Parameter, Tensor] = {}
        self._before: list[dict[Parameter, Tensor]] = []
        self._shown = 0
        self._spare: dict[Parameter, list[Tensor]] = {}

    @property
    def newest(self) -> int:
        return len(self._before)

    def begin(self) -> None:
        """Start a step of Lightning's loop."""
        for copies in self._before:
            for parameter, copy in copies.items():
                self._spare.setdefault(parameter, []).append(copy)
        self._before, self._live, self._shown = [], {}, 0

    def keep(self, parameters: Iterable[Parameter]) -> None:
        """Copy the parameters that an optimizer is about to change; the newest version must be in place."""
        assert self._shown == self.newest, "an older version is in place"
        live = {parameter: parameter.data for parameter in parameters}
        copies = {parameter: self._copy(parameter) for parameter in live}
        if copies:
            torch._foreach_copy_(list(copies.values()), list(live.values()))
        self._live |= live
        self._before.append(copies)
        self._shown = self.newest

    def show(self, version: int) -> None:
        """Put a version in place; the parameters then refer to other memory."""
        if version == self._shown:
            return
        self._shown = version
        for parameter, live in self._live.items():
            later = (copies[parameter] for copies in self._before[version:] if parameter in copies)
            parameter.data = next(later, live)

    def _copy(self, parameter: Parameter) -> Tensor:
        spare = self._spare.get(parameter)
        while spare:
            copy = spare.pop()
            if copy.shape == parameter.shape and copy.dtype == parameter.dtype and copy.device == parameter.device:
                return copy
        return torch.empty_like(parameter.data)


class ManualSteps:
    """Runs the steps of a module with ``automatic_optimization=False``.

    Args:
        strategy: the strategy that they belong to.
        bucket_bytes: size of a gradient bucket.
        overlap: start reductions during the last micro-batch's backward.
        divergence: compares the workers' states.
        effects: changes of micro-batches beside gradients.
        kind: class of the gradients' buckets.
    """

    def __init__(
        self,
        strategy: FaultTolerantStrategy,
        bucket_bytes: int,
        divergence: Divergence,
        effects: Effects,
        *,
        kind: type[GradientBuckets],
        overlap: bool,
    ) -> None:
        self._strategy = strategy
        self._kind, self._bucket_bytes, self._overlap = kind, bucket_bytes, overlap
        self._divergence = divergence
        self._effects = effects
        named = list(strategy.module.named_parameters())
        self._named = named
        self._parameters = [parameter for _, parameter in named]
        self._states = StrandStates(self._parameters, list(strategy.module.modules()))
        self._versions = ParameterVersions()
        self._buckets: dict[MeetingPlace, GradientBuckets] = {}
        self._layouts: dict[MeetingPlace, SumsLayout] = {}
        nothing = nn.Module()
        self._no_norms, self._no_buffers = NormStatistics(nothing), ModuleBuffers(nothing)
        self._placed: Strand | None = None
        self._in_backward = False
        self._stepped: list[Optimizer] = []
        self._scheduled = 0
        self._number = 0
        self._target: MeetingPlace = END
        self._strands: dict[int, Strand] = {}
        self._held: set[int] = set()
        self._repeated: Strand | None = None
        """That of another rank's micro-batch, see `_repeat`."""
        self._aside: list[Tensor | None] = []
        self._outside: Recording = (None, None, None)
        self._arriving: dict[str, Tensor] | None = None
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._check_backward) for p in trained]

    @property
    def runs(self) -> bool:
        """Whether a ``training_step`` is in progress."""
        return self._placed is not None

    def close(self) -> None:
        """Release the buckets and hooks."""
        for buckets in self._buckets.values():
            buckets.close()
        for handle in self._handles:
            handle.remove()
        self._buckets.clear()
        self._handles = []

    # ---- state for joiners

    def state(self) -> dict[str, Any]:
        """Return the gradients that are kept between steps, and the agreed unused parameters, as plain data."""
        kept = {name: parameter.grad for name, parameter in self._named if parameter.grad is not None}
        agreed = [
            [list(meeting.mask or ()), layout.unused, *([layout.tops] if layout.tops else [])]
            for meeting, layout in self._layouts.items()
        ]
        return {"gradients": kept, "meetings": agreed}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take another worker's `state`; `arrive` follows, after Lightning has reset the gradients."""
        self._arriving = state["gradients"]
        for mask, unused, *tops in state["meetings"]:
            layout = self._layout(MeetingPlace(mask=tuple(map(bool, mask))))
            layout.unused, layout.tops = list(unused), dict(*tops)

    def arrive(self) -> None:
        """Set the gradients of a loaded state, before the first step."""
        if self._arriving is not None:
            gradients, self._arriving = self._arriving, None
            for name, parameter in self._named:
                gradient = gradients.get(name)
                parameter.grad = None if gradient is None else in_order_of(parameter, gradient.to(parameter.device))

    # ---- the step, on the training thread

    def run(self, batch: GlobalBatch, *where: int) -> FinishedStep:
        """Run a step through failures, up to its last commit."""
        strategy = self._strategy
        self._batch, self._takes_index = batch, bool(where)
        self._effects.begin(batch.micro_batches[0], strategy.agreed, anew=batch.step == 0)
        self._versions.begin()
        self._stepped, self._scheduled, self._number, self._placed = [], 0, 0, None
        self._base = self._states.take(strategy.module)
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        if scaler is not None:
            scaler.scale(torch.zeros((), device=strategy.root_device))  # creates its state even without a share
        own = strategy.parallelism.own(batch.in_full_step)
        self._held, self._strands = set(own), {}
        lead = self._make(own[0], batch.fetch) if own else self._make(batch.micro_batches[0], batch.stand_in)
        if own:
            self._strands[lead.number] = lead
        try:
            with self._once():
                return self._meetings(lead)
        finally:
            for strand in {id(each): each for each in (lead, *self._strands.values())}.values():
                strand.close()
            self._drop_repeated()
            self._strands, self._placed = {}, None

    def _meetings(self, lead: Strand) -> FinishedStep:
        strategy = self._strategy
        digest = self._divergence.digest(
            strategy.engine, strategy.module, strategy.optimizers, partial(further_state, strategy.trainer)
        )
        while True:
            self._place(lead)
            self._target = self._bring(lead, None)
            if self._target is END:
                return self._end(lead, digest)
            self._backward_meeting(lead)
            self._number += 1

    def _backward_meeting(self, lead: Strand) -> None:
        """Run all micro-batches' backwards of a meeting, and give each strand here the summed gradients."""
        gradients, layout = self._buckets_of(self._target), self._layout(self._target)
        self._put_aside(gradients, [None] * len(gradients.parameters))
        sums = step_sums(layout, self._no_norms, self._no_buffers, gradients, None, self._batch.micro_batches)

        def run(number: int) -> None:
            summed = self._put_back(gradients)
            strand = self._strand(number)
            self._bring(strand, self._target)
            self._put_aside(gradients, summed)
            strand.computes = True
            strand.advance()
            strand.meeting += 1
            assert strand.loss is not None
            sums.add(strand.loss, (), number)

        done = self._strategy.trainer.fit_loop.epoch_loop._batches_that_stepped  # the engine counts optimizer steps
        witness = self._strategy.witness.of_step(done, gradients, partial(self._repeat, gradients))
        finished = self._run(run, gradients, sums, NO_DIGEST, witness).finished
        self._put_back(gradients)
        self._drop_repeated()
        _, _, used = sums.finish()
        result = gradients.summed(used)
        for number, strand in list(self._strands.items()):
            if number not in finished and strand is not lead:
                strand.close()
                del self._strands[number]
                if self._placed is strand:
                    self._effects.restore()
                    self._take_away()
        if lead.meeting == self._number:  # its micro-batch is another rank's, or this rank has none
            self._place(lead)
            self._skip(lead)
        self._held = set(self._strands)
        for strand in {id(each): each for each in (lead, *self._strands.values())}.values():
            self._add(strand, result)

    def _end(self, lead: Strand, digest: StateDigest) -> FinishedStep:
        """Bring all micro-batches to the end of ``training_step``, and commit their other effects."""
        strategy, effects, batch = self._strategy, self._effects, self._batch
        gradients = self._buckets_of(END)
        parts = (effects.norms, effects.buffers, gradients, effects.metrics)
        sums = step_sums(strategy.agreed, *parts, batch.micro_batches)

        def run(number: int) -> None:
            strand = self._strand(number)
            self._bring(strand, END)
            assert strand.recording[2] is not None
            sums.add(self._loss(strand), strand.recording[2], number)
            effects.finish_micro_batch(number)
            batch.finished(number)
            self._take_away()

        operation = self._run(run, gradients, sums, digest)
        if self._placed is not None:
            effects.restore()
            self._take_away()
        self._versions.show(self._versions.newest)
        assert lead.state is not None
        self._states.put(strategy.module, lead.state)
        self._divergence.check(operation, strategy.engine)
        loss, calls, _ = sums.finish()
        effects.norms.commit(len(batch.micro_batches))
        output = apply_to_collection(lead.output, Tensor, Tensor.detach)
        return FinishedStep(operation=operation, loss=loss, calls=calls, output=output)

    def _repeat(self, gradients: GradientBuckets, number: int) -> None:
        """Run another rank's micro-batch from its start through the backward of this meeting, for its gradients."""
        summed = self._put_back(gradients)
        with kept():
            strand = self._make(number, self._batch.fetch)
        self._place(strand)
        self._drop_repeated()
        self._repeated = strand
        self._bring(strand, self._target)
        self._put_aside(gradients, summed)
        strand.computes = True
        strand.advance()

    def _drop_repeated(self) -> None:
        strand, self._repeated = self._repeated, None
        if strand is None:
            return
        strand.close()
        if self._placed is strand:
            self._effects.restore()
            self._take_away()

    def _run(
        self,
        run: Callable[[int], None],
        gradients: GradientBuckets,
        sums: StepSums,
        digest: StateDigest,
        witness: WitnessedStep | None = None,
    ) -> MeetingStep:
        operation = MeetingStep(
            self._batch.micro_batches,
            gradients,
            sums,
            run,
            strands=self._held,
            meeting=self._target,
            place=self._name,
            digest=digest,
            witness=witness,
        )
        self._strategy.engine.run(operation)
        return operation

    # ---- strands

    @property
    def _name(self) -> str:
        return f"{type(self._strategy.module).__qualname__}.training_step"

    def _make(self, number: int, fetch: Callable[[int], Any]) -> Strand:
        """Return the strand of a micro-batch, before its start, on the samples that ``fetch`` returns."""
        strategy, batch = self._strategy, self._batch
        activity, module, plugin = strategy.engine.activity, strategy.module, strategy.precision_plugin
        activity.enter("data", number)
        fetched = fetch(number)
        seed_all(place_seed(strategy.seed, RandomPurpose.TRANSFER, batch.epoch, batch.step, number))
        data = strategy.to_device(fetched)
        activity.enter("compute", number)
        strategy.engine.fault("forward", strategy.engine.step, number, module)
        shape = strategy.shape
        index = shape.batch_index(batch.step, batch.place(number))

        def call() -> Any:
            seed_all(place_seed(strategy.seed, RandomPurpose.FORWARD, batch.epoch, batch.step, number))
            self._effects.start_micro_batch()
            with torch.enable_grad(), plugin.train_step_context():
                return module.training_step(data, index) if self._takes_index else module.training_step(data)

        return Strand(number, call, activity, strategy.root_device, (data, None, []))

    def _strand(self, number: int) -> Strand:
        """Return a micro-batch's strand, in place; it is made if this rank has none."""
        strand = self._strands.get(number)
        if strand is None:
            with kept():  # for the strand in place; fetching and moving samples draw other numbers
                strand = self._strands[number] = self._make(number, self._batch.fetch)
            self._held.add(number)
        self._place(strand)
        return strand

    def _bring(self, strand: Strand, target: MeetingPlace | None) -> MeetingPlace:
        """Bring a strand, in place, to the present meeting, and return where it stands.

        Raises:
            ConfigError: it has come to another meeting than ``target``.
        """
        while True:
            at = strand.at if strand.at is not None else strand.advance()
            assert at is not None
            if strand.meeting == self._number:
                if target is not None:
                    check_same([described(at), described(target)], self._name)
                return at
            if at is END:
                check_same([described(at), ""], self._name)
            self._skip(strand)

    def _skip(self, strand: Strand) -> None:
        """Bring a strand, in place, past a backward whose gradients are not needed from it."""
        strand.computes = False
        strand.advance()
        strand.meeting += 1

    def _place(self, strand: Strand) -> None:
        """Put a strand's state in place of another's."""
        if self._placed is strand:
            return
        module, results = self._strategy.module, self._strategy.results
        if self._placed is not None:
            state = self._placed.state = self._states.take(module)
            state.random, state.effects = random_states(), self._effects.hold()
            self._placed.recording = results.exchange(strand.recording)
        else:
            self._outside = results.exchange(strand.recording)
        if strand.state is None:
            copied = [None if gradient is None else gradient.clone() for gradient in self._base.gradients]
            self._states.put(module, replace(self._base, gradients=copied))
        else:
            self._states.put(module, strand.state)
            restore_random_states(strand.state.random)
            self._effects.put_back(strand.state.effects)
        self._versions.show(strand.steps)
        self._placed = strand

    def _take_away(self) -> None:
        """Leave no strand in place; the effects have been restored or recorded."""
        if self._placed is not None:
            self._placed.state = self._states.take(self._strategy.module)
            self._placed.recording = self._strategy.results.exchange(self._outside)
            self._placed = None

    def _put_aside(self, gradients: GradientBuckets, summed: Sequence[Tensor | None]) -> None:
        """Put the sums of a meeting's gradients in place of those that the strand in place has."""
        self._aside = [parameter.grad for parameter in gradients.parameters]
        for parameter, gradient in zip(gradients.parameters, summed, strict=True):
            parameter.grad = gradient

    def _put_back(self, gradients: GradientBuckets) -> list[Tensor | None]:
        """Undo `_put_aside`; return the sums."""
        summed = [parameter.grad for parameter in gradients.parameters]
        for parameter, gradient in zip(gradients.parameters, self._aside, strict=True):
            parameter.grad = gradient
        return summed

    def _add(self, strand: Strand, summed: Mapping[Parameter, Tensor]) -> None:
        """Add a meeting's gradients to those that a strand has."""
        for index, parameter in enumerate(self._parameters):
            more = summed.get(parameter)
            if more is None:
                continue
            if strand is self._placed:
                parameter.grad = more.clone() if parameter.grad is None else parameter.grad + more
            else:
                assert strand.state is not None
                own = strand.state.gradients[index]
                strand.state.gradients[index] = more.clone() if own is None else own + more

    def _loss(self, strand: Strand) -> Tensor:
        """Return the loss to report: that of the output, else of the first backward."""
        output = strand.output
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor):
            return loss.detach()
        return torch.zeros(()) if strand.loss is None else strand.loss

    # ---- parts that are built once

    def _buckets_of(self, meeting: MeetingPlace) -> GradientBuckets:
        buckets = self._buckets.get(meeting)
        if buckets is None:
            needed = zip(self._named, meeting.mask or [False] * len(self._named), strict=True)
            named = [each for each, is_needed in needed if is_needed]
            buckets = self._buckets[meeting] = self._kind(named, self._bucket_bytes, self._overlap)
        return buckets

    def _layout(self, meeting: MeetingPlace) -> SumsLayout:
        return self._layouts.setdefault(meeting, SumsLayout())

    # ---- calls of the module's code, on a strand's thread

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run `manual_backward`, together with all other micro-batches.

        Raises:
            ConfigError: outside of ``training_step``.
        """
        strand, module, plugin = self._placed, self._strategy.module, self._strategy.precision_plugin
        if strand is None:
            raise ConfigError(
                f"{type(module).__qualname__} calls manual_backward() outside of training_step, where the unicron "
                "strategy has no micro-batches: expected it in training_step"
            )
        if strand.loss is None:
            strand.loss = loss.detach().reshape(())
        strand.stop(MeetingPlace(mask=tuple(parameter.requires_grad for parameter in self._parameters)))
        if strand.computes:
            scaled = plugin.pre_backward(loss / self._strategy.shape.divisor(self._batch.in_full_step), module)
            self._in_backward = True
            plugin.backward(scaled, module, None, *args, **kwargs)
            self._in_backward = False
            plugin.post_backward(scaled, module)
        strand.stop(None)
        return loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[..., Any]) -> Any:
        """Run an optimizer's step once on this rank, for all its micro-batches.

        Args:
            optimizer: the module's.
            closure: the module's, run for each micro-batch.
            step: Lightning's step of the optimizer, given a closure.
        """
        output = closure()
        strand = self._placed
        assert strand is not None
        place = strand.steps
        if place < self._versions.newest:
            if self._stepped[place] is not optimizer:
                raise ConfigError(
                    f"{self._name}: micro-batches of one step call the optimizers' steps in different orders; let the "
                    "order depend on batch_idx, not on the data"
                )
            strand.steps += 1
            self._versions.show(strand.steps)
            return output
        loop = self._strategy.trainer.fit_loop.epoch_loop.manual_optimization
        self._versions.keep(parameter for group in optimizer.param_groups for parameter in group["params"])
        self._stepped.append(optimizer)
        strand.steps += 1
        strand.recording = self._strategy.results.exchange(self._outside)
        # The states of other strands have none of the step's numbers.
        with seeded(self._strategy.seed, RandomPurpose.OPTIMIZER, self._batch.epoch, self._batch.step, place):
            loop._on_before_step()
            stepped = step(do_nothing_closure)
            loop._on_after_step()
        self._strategy.results.exchange(strand.recording)
        return stepped if output is None else output

    @contextmanager
    def _once(self) -> Iterator[None]:
        """Have schedulers step, and Lightning count optimizer steps, once on this rank for all its micro-batches."""
        strategy = self._strategy
        for optimizer in strategy._lightning_optimizers:
            optimizer._on_before_step = optimizer._on_after_step = do_nothing_closure
        schedulers = [config.scheduler for config in strategy.trainer.lr_scheduler_configs]
        for scheduler in schedulers:
            scheduler.step = self._scheduling(scheduler, scheduler.step)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for scheduler in schedulers:
                del scheduler.step

    def _scheduling(self, scheduler: Any, step: Callable[..., None]) -> Callable[..., None]:
        def once(*args: Any, **kwargs: Any) -> None:
            strand = self._placed
            assert strand is not None
            if isinstance(scheduler, ReduceLROnPlateau):
                raise ConfigError(
                    f"{self._name} calls ReduceLROnPlateau.step(), whose metric is that of one micro-batch; call it in "
                    "on_train_epoch_end or on_validation_end, with a value of self.trainer.callback_metrics"
                )
            strand.schedules += 1
            if strand.schedules > self._scheduled:
                self._scheduled += 1
                step(*args, **kwargs)

        return once

    def _check_backward(self, parameter: Tensor) -> None:
        if self._placed is not None and not self._in_backward:
            raise ConfigError(
                f"{self._name} calls loss.backward(); expected self.manual_backward(loss), which sums gradients over "
                "all micro-batches"
            )
