"""A step of a loop: the script's function runs for each micro-batch of this rank, and again for those of a lost one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.seeding import RandomPurpose, place_seed, preserved, seed_all
from unicron_lightning.data.steps import Steps
from unicron_lightning.errors import ConfigError
from unicron_lightning.loop.registered import RegisteredObjects
from unicron_lightning.worker.agreement import NO_DIGEST, StateDigest, part_of
from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.effects import UNCOUNTED, Effects
from unicron_lightning.worker.exact_sums import ExactGradients, step_sums
from unicron_lightning.worker.reporting import StepReports
from unicron_lightning.worker.step import GradientStep
from unicron_lightning.worker.sums import LogCall, Options, StepSums, SumsLayout

if TYPE_CHECKING:
    from unicron_lightning.loop.run import Run
    from unicron_lightning.replica.step import ReplicaStep

LOSS: Final = "loss"
BACKWARD: Final = (
    "backward() was called by the script: the function of step.run() returns the loss, and step.run() calls backward "
    "and sums the gradients over the ranks. Use torch.autograd.grad for others"
)


class LoopStep:
    """An optimizer step of a loop, valid until the loop asks for the next one.

    Args:
        steps: runs it.
        batch: locates the samples.
        number: of the step.
        data: has the step.

    Attributes:
        number: of this step in the run, from 1: ``run.global_step`` after it.
        epoch: of the data, from 0.
    """

    def __init__(self, steps: LoopSteps, batch: GlobalBatch, number: int, data: Steps) -> None:
        self.number = number
        self.epoch = batch.epoch
        self._data = data
        self._ends_epoch: bool | None = None
        self._steps: LoopSteps | None = steps
        self._batch = batch
        self._calls = 0
        self._logged: dict[str, float] = {}

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last step of its data epoch; of streams it is known once `run` has returned."""
        return self._data.is_last(self._batch) if self._ends_epoch is None else self._ends_epoch

    def run(self, function: Callable[[Any], Any], *, max_norm: float | None = None) -> Any:
        """Run forward and backward of all micro-batches of the step, over all ranks and through failures.

        Afterwards each trained parameter's ``grad`` is that of the mean loss of the global batch, the same on all
        ranks. Gradients from before are discarded. It may be called several times in a step, each time with all of the
        step's micro-batches, e.g. for the two models of a GAN.

        Args:
            function: given a micro-batch as the data loader yields it, returns its loss, a scalar tensor; or a mapping
                with the loss as "loss", and further scalars. It is called for each micro-batch of this rank, and for
                those of lost ranks: what it does beside gradients and the models' buffers is not undone.
            max_norm: the gradients are clipped to this norm; with an optimizer that needs whole parameters of sharded
                models, this takes the place of `clip_grad_norm_`.

        Returns:
            The mean over the micro-batches, the same on all ranks: float64 tensors without a graph, in the function's
            form.

        Raises:
            ConfigError: the function returned no loss, or called ``backward`` itself.
        """
        call, self._calls = self._calls, self._calls + 1
        steps = self._of("run")
        steps.max_norm = max_norm
        found = steps.run(self._batch, function, call)
        self._logged = {LOSS: float(found[LOSS] if isinstance(found, dict) else found)}
        return found

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all trained parameters, as `torch.nn.utils.clip_grad_norm_`; return their norm.

        With a registered scaler they are divided by its scale before, unless the script has done so.
        """
        steps = self._of("clip_grad_norm_")
        if not self._calls:
            raise ConfigError(f"step.clip_grad_norm_({max_norm}): there are no gradients before step.run()")
        if steps.stages:
            raise ConfigError(
                f"step.clip_grad_norm_({max_norm}) with an optimizer that needs whole parameters, whose update is "
                f"computed in step.run(); expected step.run(function, max_norm={max_norm})"
            )
        return steps.clip(max_norm, norm_type)

    def log(self, **values: float | Tensor) -> None:
        """Report values that are equal on all ranks, such as those that `run` returned, to the coordinator.

        Raises:
            ConfigError: a value is no number.
        """
        steps = self._of("log")
        for name, value in values.items():
            self._logged[name] = float(scalar(f"step.log({name}=...)", value))
        if steps.run_of.engine.control is not None:
            steps.run_of.engine.control.progress(steps.run_of.engine.step, self._logged, self._batch.num_samples())

    def finish(self) -> None:
        """End the step, of which all ranks have left the body."""
        if not self._calls:
            self._data.left_out(self._batch)
        self._ends_epoch = self.ends_epoch
        self.end()

    def end(self) -> None:
        """End the step's validity."""
        self._steps = None

    def _of(self, method: str) -> LoopSteps:
        if self._steps is None:
            raise ConfigError(f"step.{method}() of step {self.number}, which is over; use the loop's present step")
        return self._steps


class LoopSteps:
    """Runs the steps of a run.

    Args:
        run: whose steps they are.
        bucket_bytes: size of a gradient bucket.
        overlap: whether reductions start during the last micro-batch's backward.
        reproducible: sums are exact.

    Attributes:
        run_of: as above.
        layouts: agreements on the sums of the first call of `LoopStep.run` in a step, the second one, etc.
        max_norm: to which the present call clips gradients.
        stages: whether `run` computes updates.
    """

    max_norm: float | None = None
    stages = False

    def __init__(self, run: Run, bucket_bytes: int, *, overlap: bool, reproducible: bool = False) -> None:
        self.run_of = run
        self.layouts = [SumsLayout()]
        self._options = bucket_bytes, overlap
        self._kind = ExactGradients if reproducible else GradientBuckets
        self._gradients: GradientBuckets | None = None
        self._effects: Effects | None = None
        self._reports = StepReports()

    @property
    def _registered(self) -> RegisteredObjects:
        return self.run_of.registered

    def run(self, batch: GlobalBatch, function: Callable[[Any], Any], call: int) -> Any:
        """Run a step's micro-batches; see `LoopStep.run`."""
        run, engine = self.run_of, self.run_of.engine
        run.check_whole()
        self._lay_out(call + 1)
        operation = self._operation(batch, function, call)
        assert self._effects is not None
        with run.failing(), preserved():
            engine.run(operation)
            run.divergence.check(operation, engine)
        assert isinstance(operation.sums, StepSums)
        loss, calls, used = operation.sums.finish()
        assert loss is not None, "each micro-batch has a loss"
        self._effects.norms.commit(len(batch.micro_batches))
        self._install(operation, used)
        if self.max_norm is not None:
            self.clip(self.max_norm, 2.0)
        if call == 0:
            self._reports.finished(engine, operation, loss, batch.num_samples())
        engine.activity.enter("hooks")
        means = {each.options[1]: each.value for each in calls}
        return means if means else torch.tensor(loss, dtype=torch.float64)

    def _operation(
        self, batch: GlobalBatch, function: Callable[[Any], Any], call: int
    ) -> GradientStep | ReplicaStep[Any]:
        """Begin one call of `LoopStep.run`, and return its operation."""
        gradients, effects, layout = self._buckets(anew=batch.step == 0), self._begin_effects(), self.layouts[call]
        gradients.begin()
        effects.begin(batch.micro_batches[0], layout, anew=False)
        sums = step_sums(layout, effects.norms, effects.buffers, gradients, None, batch.micro_batches)
        calls = FunctionCalls(self.run_of, batch, function, sums.add, effects, gradients, call)
        witness = self.run_of.witness.of_step(self.run_of.global_step, gradients, calls.repeat, batch)
        digest, whole = self._digest(call), batch.in_full_step
        return GradientStep(
            batch.micro_batches, gradients, sums, calls.run, digest=digest, in_full_step=whole, witness=witness
        )

    def _begin_effects(self) -> Effects:
        if self._effects is None:
            exact = self._kind is ExactGradients
            self._effects = Effects(self._registered.module, None, frozen=True, exact=exact)
        return self._effects

    def _install(self, operation: GradientStep | ReplicaStep[Any], used: Sequence[bool]) -> None:
        """Give the parameters their gradients, once a call is committed."""
        assert self._gradients is not None
        self._gradients.install(used)
        self._gradients.refusal = BACKWARD
        self._forget(self._registered.untrained)

    @staticmethod
    def _forget(parameters: Iterable[Tensor]) -> None:
        for each in parameters:
            each.grad = None

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients; see `LoopStep.clip_grad_norm_`."""
        assert self._gradients is not None
        scaler = self._registered.scaler
        if scaler is not None:
            for optimizer in self._registered.optimizers.values():
                with contextlib.suppress(RuntimeError):  # the script has done it
                    scaler.unscale_(optimizer)
        return torch.nn.utils.clip_grad_norm_(self._gradients.parameters, max_norm, norm_type)

    def close(self) -> None:
        """Release the buckets; the gradients stay."""
        if self._gradients is not None:
            self._gradients.close()
        self._gradients = self._effects = None

    def load_layouts(self, states: Sequence[dict[str, Any]]) -> None:
        """Take the states of `layouts`; the data keep the first one."""
        self._lay_out(len(states))
        for layout, state in zip(self.layouts, states, strict=False):
            layout.load_state(state)

    def _lay_out(self, calls: int) -> None:
        while len(self.layouts) < calls:
            self.layouts.append(SumsLayout())

    def _digest(self, call: int) -> StateDigest:
        run, registered = self.run_of, self._registered
        if call:
            return NO_DIGEST

        def rest(names: Mapping[int, str]) -> dict[str, int]:
            return {**registered.numbers(names), "run.global_step": part_of(run.global_step)}

        return run.divergence.digest(run.engine, registered.module, [*registered.optimizers.values()], rest)

    def _buckets(self, *, anew: bool) -> GradientBuckets:
        """Return the buckets, rebuilt when other parameters are trained than before."""
        named = self._registered.trained(anew=anew)
        if self._gradients is None or not self._gradients.matches([parameter for _, parameter in named]):
            if self._gradients is not None:
                self._gradients.close()
            bucket_bytes, overlap = self._options
            self._gradients = self._kind(named, bucket_bytes, overlap)
        return self._gradients


class Refusing(Protocol):
    """Refuses gradients; `GradientBuckets` implements it."""

    refusal: str


class FunctionCalls:
    """Runs the micro-batches of one call of `LoopStep.run`.

    Random state depends on (seed, epoch, step, micro-batch, call) only, and the loss is divided by the number of the
    step's micro-batches.

    Args:
        run: whose step it is.
        batch: locates the samples.
        function: of the script.
        take: takes one micro-batch's loss and values.
        effects: receive the other changes.
        gradients: refuse a backward by the function.
        call: number of the call in the step.
    """

    def __init__(
        self,
        run: Run,
        batch: GlobalBatch,
        function: Callable[[Any], Any],
        take: Callable[[Tensor, Sequence[LogCall], int], None],
        effects: Effects,
        gradients: Refusing,
        call: int,
    ) -> None:
        self._run_of, self._batch, self._function = run, batch, function
        self._take, self._effects, self._gradients = take, effects, gradients
        self._call, self._place = call, partial(_place, batch, call)
        self._scaler = run.registered.scaler
        if self._scaler is not None:
            self._scaler.scale(torch.zeros((), device=run.device))  # creates its state even without a share

    def run(self, micro_batch: int, *, counts: bool = True) -> None:
        """Run forward and backward; gradients accumulate. If it does not count, they are zero."""
        loss, calls = self._pass(micro_batch, counts=counts)
        if counts:
            self._take(loss, calls, micro_batch)
        self._effects.finish_micro_batch(micro_batch if counts else UNCOUNTED)
        if counts and not self._call:  # it reads ahead in streams, whose ends are part of this call's commit
            self._batch.finished(micro_batch)

    def repeat(self, micro_batch: int, *, counts: bool = True) -> None:
        """Run forward and backward of a micro-batch that another rank has; all but the gradients is dropped."""
        with self._effects.dropped():
            self._pass(micro_batch, counts=counts)

    def _pass(self, micro_batch: int, *, counts: bool) -> tuple[Tensor, list[LogCall]]:
        """Run forward and backward; return the loss and the values."""
        run, effects = self._run_of, self._effects
        activity = run.engine.activity
        activity.enter("data", micro_batch)
        samples = self._batch.fetch(micro_batch) if counts else self._batch.stand_in(micro_batch)
        activity.enter("compute", micro_batch)
        seed_all(place_seed(run.seed, RandomPurpose.FORWARD, *self._place(micro_batch)))
        run.engine.fault("forward", run.engine.step, micro_batch, run.registered.module)
        effects.start_micro_batch()
        self._gradients.refusal = BACKWARD
        with torch.enable_grad():
            loss, calls = _parts(self._function(samples))
            scaled = loss / len(self._batch.micro_batches) if counts else loss * 0.0
            self._gradients.refusal = ""
            (scaled if self._scaler is None else self._scaler.scale(scaled)).backward()
        return loss, calls


def _place(batch: GlobalBatch, call: int, micro_batch: int) -> tuple[int, ...]:
    """Return the place of a micro-batch, which decides its random state."""
    return (batch.epoch, batch.step, micro_batch, *([call] if call else []))


def _parts(output: Any) -> tuple[Tensor, list[LogCall]]:
    """Return the loss and the values of a micro-batch; a mapping's loss is one of its values.

    Raises:
        ConfigError: there is no loss, or a value is no scalar.
    """
    values = output if isinstance(output, Mapping) else {}
    loss = values.get(LOSS) if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ConfigError(
            f"the function of step.run() returned {_shown(output)}; expected a loss, a scalar tensor that needs a "
            "gradient, or a mapping with one as 'loss'"
        )
    calls = []
    for name, value in values.items():
        options: Options = ("step", str(name), False, False, False, True, "mean", False)
        number = scalar(f"the function of step.run() returned {name}=...", value)
        calls.append(LogCall(options=options, value=number, weight=1.0))
    return loss.reshape(()), calls


def scalar(where: str, value: Any) -> Tensor:
    """Return a number as a scalar tensor.

    Raises:
        ConfigError: it is none.
    """
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    if not is_number or (isinstance(value, Tensor) and value.is_complex()):
        raise ConfigError(f"{where}: found {_shown(value)}, expected a number or a scalar tensor")
    return torch.as_tensor(value).detach().reshape(()).double()


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, requires_grad={value.requires_grad}"
    return f"{value!r:.80}"
