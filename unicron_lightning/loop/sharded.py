"""Models that a run's workers hold in shards, by FSDP2, in replicas of S workers (docs/loop.md, docs/sharded.md).

The script shards its modules on `Run.mesh`. A step is the operation of the strategy ``unicron_fsdp``: rows of S
micro-batches, one for each shard. A call of `LoopStep.run` is committed before the script's own code for it runs, so
that no communication follows within it, and a worker that belongs to no replica has no gradients to step with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from unicron_lightning import environ
from unicron_lightning.checkpoints.pieces import HeldCheckpoint, HeldTensor, saved_bytes
from unicron_lightning.checkpoints.saving import WriteFile
from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.passes import IndexedBatches, PassBatches
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.folder import (
    held_part,
    load_optimizer,
    load_parameters,
    whole_optimizer,
    whole_parameters,
)
from unicron_lightning.fsdp.gradients import clip_factor, clip_shards
from unicron_lightning.fsdp.holder import ShardHolder
from unicron_lightning.fsdp.mesh import check_norms, reshard, shard_mesh, sum_gradients
from unicron_lightning.fsdp.model import FsdpShard, accelerator_for
from unicron_lightning.fsdp.rows import StepRows, number_of_rows
from unicron_lightning.fsdp.whole_updates import WholeUpdates, needs_whole
from unicron_lightning.loop.evaluation import LoopPass, encode_values
from unicron_lightning.loop.loop_steps import BACKWARD, FunctionCalls, LoopSteps
from unicron_lightning.loop.models import WholeModels
from unicron_lightning.loop.registered import OF_SHARDS, RegisteredObjects, others_of
from unicron_lightning.replica.division import ReplicaDivision
from unicron_lightning.replica.layout import Shape
from unicron_lightning.replica.step import ReplicaEvaluation, ReplicaStep, RowPass
from unicron_lightning.worker import codec
from unicron_lightning.worker.agreement import NO_DIGEST
from unicron_lightning.worker.communication.nccl import check_device
from unicron_lightning.worker.engine import World
from unicron_lightning.worker.model_state import share_initial
from unicron_lightning.worker.operations import Agreement
from unicron_lightning.worker.rows import Report, ReportSum
from unicron_lightning.worker.session import FitPassed, Session, control_of_process
from unicron_lightning.worker.step import GradientStep

if TYPE_CHECKING:
    from unicron_lightning.loop.run import Run

_APART: Final = (
    "the script lets the shards of a model communicate outside of step.run() and run.evaluate(), where no failure can "
    "be recovered: run the model in their functions only, clip by step.clip_grad_norm_(), and get whole tensors by "
    "run.save()"
)


class ShardedModels(WholeModels):
    """Each worker holds a shard of the models that the script has sharded on the mesh, and all of its other ones.

    Args:
        run: whose models they are.
        size: workers of a replica; 1 in a process without an agent.
        exact: whether sums are those of a reproducible run.

    Attributes:
        holder: this worker's part in the world of replicas.
        due: names of the optimizers that have not stepped since the last call of `LoopStep.run`.
        refusal: message of the `ConfigError` that a backward raises now; empty: none is raised.

    Raises:
        ConfigError: the device is not supported.
    """

    registered: ShardedObjects
    holder: ShardHolder

    def __init__(self, run: Run, size: int, *, exact: bool = False) -> None:
        super().__init__(run)
        check_device(run.device)
        self._exact = exact
        self._division = ReplicaDivision(run, lambda: self.holder.member, lambda: self.registered.module)
        self._size = size if environ.under_agent() else 1
        self._micro_batches = 0
        self.refusal = ""
        self.due: set[str] = set()

    @override
    def open(self, micro_batches: int) -> tuple[Session, bool]:
        if control_of_process() is not None:
            raise ConfigError("this script has a second Run(shard_size=...): one is supported, for all of its loops")
        self._micro_batches = micro_batches
        rows = number_of_rows(range(micro_batches), self._size)
        shape = Shape(tensor=self._size, replicas=rows, sharded=True)
        self.holder = ShardHolder(shape, open_ended=True)
        return Session.of_process(self._run.device, shape.workers, self.enter, self.holder.fabric)

    @override
    def begin(self, session: Session) -> None:
        self.holder.begin(session)
        if not session.is_joiner:  # its shard is that of its rank
            session.engine.run(Agreement("shards", lambda rank: b""))
        self._group = self.holder.make_group(session, int(os.environ.get("LOCAL_RANK", "0")))
        self._group.refusal = _APART
        self._mesh = shard_mesh(self._group, self._run.device)
        self.registered = ShardedObjects(self._mesh, exact=self._exact)

    @property
    @override
    def mesh(self) -> DeviceMesh:
        return self._mesh

    @property
    def shard(self) -> FsdpShard:
        """This worker's shard of the models."""
        return self.holder.member.model

    @override
    def steps(self, bucket_bytes: int, *, overlap: bool, reproducible: bool) -> LoopSteps:
        return ShardedLoopSteps(self._run, self)

    @override
    def enter(self, world: World) -> None:
        super().enter(world)
        self.holder.enter(world, lambda: self._run.engine)

    @override
    def build(self) -> None:
        if self.holder.fabric.built:
            return
        module, device = self.registered.module, self._run.device
        sum_gradients(module)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._refuse)
        accelerator = accelerator_for(device, lambda: self._run.engine.check())
        model = LoopShard(self.registered, self._group, device=device, accelerator=accelerator, exact=self._exact)
        for name, optimizer in self.registered.optimizers.items():
            if needs_whole(optimizer):
                model.updates[name] = WholeUpdates(optimizer, self._group)
                model.updates[name].step_by(optimizer, partial(self._take, name))
            else:
                optimizer.register_step_post_hook(partial(self._stepped, name))
        self.holder.hold(model, self._micro_batches)

    @override
    def found(self, *, reads: bool) -> None:
        if not self.holder.fabric.built:
            self.build()
            share_initial(self.registered.undivided(), self._run.engine)
        self.holder.found(self._run.engine)

    @override
    def share(self, micro_batches: range) -> list[int]:
        return self.holder.share(micro_batches)

    @override
    def own(self, in_full_step: Sequence[int]) -> list[int]:
        return self.holder.own(in_full_step)

    @override
    def evaluation(self, batches: PassBatches, function: Callable[[Any], Any], place: tuple[int, int, int]) -> LoopPass:
        if not self._run.engine.has_state:
            raise FitPassed(
                "run.evaluate() of a joiner before it has a shard: the worker joins when it is started again"
            )
        if self._run.left_out:
            self.found(reads=True)
        if not self.holder.fabric.built:
            raise ConfigError("run.evaluate() before the first loop of a run with shard_size: expected it later")
        for name in self.due:
            if any(each.grad is not None for each in _parameters_of(self.registered.optimizers[name])):
                raise ConfigError(
                    f"run.evaluate() between step.run() and the step of the optimizer {name!r}, with shard_size: "
                    "expected it after the optimizer's step, or after zero_grad() if there is none"
                )
        return ShardedLoopPass(self, self._run.engine, self.registered.module, batches, function, place)

    @override
    def at_boundary(self) -> None:
        self.holder.fabric.leave_if_surplus()

    @override
    def writing(self, write: Callable[[Mapping[str, Any]], str]) -> WriteFile:
        registered = self.registered

        def whole(states: Sequence[Any]) -> str:
            models: dict[str, dict[str, Tensor]] = {name: {} for name, _ in registered.module.named_children()}
            for key, tensor in whole_parameters(registered.module, [each["tensors"] for each in states]).items():
                name, _, within = key.partition(".")
                models[name][within] = tensor
            names = registered.optimizers
            optimizers = {
                name: whole_optimizer([each["optimizer"][name] for each in states], optimizer)
                for name, optimizer in names.items()
            }
            own = [{name: each["others"][name] for name in registered.own()} for each in states]
            return write({"models": models, "optimizers": optimizers, **({OF_SHARDS: own} if own[0] else {})})

        reshard(registered.module)
        return self.holder.writing(self._run.engine, whole)

    @override
    def division(self) -> ReplicaDivision:
        return self._division

    @override
    def restored(self, state: dict[str, Any], common: bytes) -> Mapping[str, Any]:
        found: dict[str, Any] = codec.decode(common)
        self._division.load(state, found["position"][0])
        return found

    @override
    def held_parts(self) -> Sequence[str]:
        return () if self.holder.place.replica is None else (str(self.holder.fabric.own_shard),)

    @override
    def held(self, state: Mapping[str, Any], rest: Mapping[str, Any]) -> HeldCheckpoint:
        registered = self.registered
        reshard(registered.module)
        shard, shards, own = self.holder.fabric.own_shard, self.holder.part.size, registered.own()
        found = held_part(registered.module, [*registered.optimizers.values()], shard, rest)
        if own:
            data = torch.frombuffer(bytearray(saved_bytes(codec.encode(own))), dtype=torch.uint8)
            name, pieces = f"{OF_SHARDS}.{shard}", found.tensors[f"{shard}"]
            tensors = {f"{shard}": [*pieces, HeldTensor(name, data, is_object=True)]}
            places = {f"{OF_SHARDS}.{number}": (OF_SHARDS, number) for number in range(shards)}
            found = replace(found, tensors=tensors, places={**found.places, **places})
        return found

    @override
    def digest(self) -> str:
        return self.holder.digest(self._run.engine, self.registered.module)

    @override
    def finish(self) -> None:
        self.holder.member.finish(self._run.engine)

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Inside, the shards may communicate; at the end each worker has its own shards of the parameters."""
        self._group.refusal = self.refusal = ""
        try:
            yield
        finally:
            self._group.refusal, self.refusal = _APART, BACKWARD
        reshard(self.registered.module)

    def _stepped(self, name: str, *_: Any) -> None:
        self.due.discard(name)

    def _take(self, name: str) -> None:
        self.shard.updates[name].apply()
        self._stepped(name)

    def _refuse(self, _: Tensor) -> None:
        if self.refusal:
            raise ConfigError(self.refusal)


class ShardedObjects(RegisteredObjects):
    """What takes part in a run with shards. Joiners get the states of modules and optimizers from their shard's holder.

    Args:
        mesh: of the shards.
        exact: whether sums are those of a reproducible run.

    Attributes:
        has_shard: whether the state of a shard has been loaded, with the other objects' states.
    """

    def __init__(self, mesh: DeviceMesh, *, exact: bool) -> None:
        super().__init__()
        self.has_shard = False
        self._mesh, self._exact = mesh, exact

    def divided(self) -> list[nn.Parameter]:
        """Return the parameters that are sharded."""
        return [each for each in self.module.parameters() if isinstance(each, DTensor)]

    def undivided(self) -> list[Tensor]:
        """Return the parameters and buffers of which each worker has all."""
        return [each for each in (*self.module.parameters(), *self.module.buffers()) if not isinstance(each, DTensor)]

    @override
    def check(self) -> None:
        super().check()
        if self._exact:
            check_norms(self.module)
        if self.scaler is not None:
            raise ConfigError(
                "a GradScaler in a run with shard_size: expected bfloat16, by fully_shard(mp_policy="
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))"
            )
        named = {id(each): name for name, each in self.module.named_parameters()}
        for optimizer in self.optimizers.values():
            if isinstance(optimizer, LBFGS):
                raise ConfigError(
                    "LBFGS needs all parameters at once, and each worker has a shard of them; expected AdamW"
                )
        for each in self.divided():
            assert isinstance(each, DTensor)
            if each.device_mesh != self._mesh or each.placements != (Shard(0),):
                raise ConfigError(
                    f"the parameter {named[id(each)]!r} is on the mesh {each.device_mesh} with {each.placements}; "
                    "expected fully_shard(module, mesh=run.mesh), which shards the first axis"
                )

    @override
    def models(self) -> dict[str, Any]:
        return {name: {} for name, _ in self.module.named_children()}

    @override
    def _others_in(self, rest: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.has_shard and OF_SHARDS not in rest:
            return {}  # those of a worker of another shard would replace this shard's
        return others_of(rest, self._mesh.get_local_rank(), self._mesh.size())

    @override
    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}

    @override
    def _load_model(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        if state:
            reshard(module)
            load_parameters(module, state)

    @override
    def _load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any], *, converted: bool) -> None:
        if state:
            load_optimizer(optimizer, state, whole=True, converted=converted)

    @override
    def describe(self) -> dict[str, str]:
        return {**super().describe(), "shard_size": f"{self._mesh.size()}"}


class LoopShard(FsdpShard):
    """A worker's shard of a run's models, with its optimizers, and the other objects for a worker that was a spare.

    Args:
        objects: of the run.
        given, named: as of `FsdpShard`, without its root.
    """

    def __init__(self, objects: ShardedObjects, *given: Any, **named: Any) -> None:
        super().__init__(objects.module, *given, **named)
        self._objects = objects

    @override
    def plain_state(self) -> dict[str, Any]:
        others = {name: each.state_dict() for name, each in self._objects.others.items()}
        return {**super().plain_state(), "others": others}

    @override
    def load_plain(self, state: Mapping[str, Any]) -> None:
        reshard(self.root)
        for name, each in self._objects.others.items():
            each.load_state_dict(state["others"][name])
        self._objects.has_shard = True
        super().load_plain(state)

    @override
    def _optimizer_state(self) -> dict[str, Any]:
        return {name: self._shard_of(each) for name, each in self._objects.optimizers.items()}

    @override
    def _load_optimizer(self, state: Mapping[str, Any]) -> None:
        for name, each in self._objects.optimizers.items():
            self._load_shard(each, state[name])


class ShardedLoopSteps(LoopSteps):
    """Runs the steps of a run with shards.

    Args:
        run: whose steps they are.
        models: its models.
    """

    def __init__(self, run: Run, models: ShardedModels) -> None:
        super().__init__(run, 1, overlap=False)
        self._models = models
        self._norm = 0.0
        """Of the present gradients, over the whole models."""

    @override
    def run(self, batch: GlobalBatch, function: Callable[[Any], Any], call: int) -> Any:
        with self._models.communicating():
            found = super().run(batch, function, call)
        for updates in self._models.shard.updates.values():
            updates.hand()
        return found

    @override
    def _operation(self, batch: GlobalBatch, function: Callable[[Any], Any], call: int) -> ReplicaStep[Any]:
        run, models, model = self.run_of, self._models, self._models.shard
        reshard(model.root)
        self._forget(model.root.parameters())
        for each in model.updates.values():
            each.prepared = self._clipped
        model.gradients.parameters = [parameter for _, parameter in self._registered.trained(anew=batch.step == 0)]
        effects = self._begin_effects()
        rows = StepRows(batch, models.holder.part, effects, self.layouts[call], run.engine.activity, model.gradients)
        calls = FunctionCalls(run, batch, function, rows.add, effects, models, call)
        digest = NO_DIGEST if call else run.divergence.shard_digest(run.engine, model.shard)
        model.loaded = rows.renew
        repeat = models.holder.released(partial(rows.repeat, calls.repeat))
        witness = rows.witness = run.witness.of_step(run.global_step, model.gradients, repeat)
        rest = (partial(rows.call, calls.run), rows.sums, None, digest, witness)
        return ReplicaStep(rows.numbers, model, models.holder.fabric, *rest)

    @override
    def _install(self, operation: GradientStep | ReplicaStep[Any], used: Sequence[bool]) -> None:
        assert isinstance(operation, ReplicaStep)
        self._norm = operation.grad_norm
        model, fabric = self._models.shard, self._models.holder.fabric
        reshard(model.root)
        self._forget(self._registered.untrained)
        if fabric.phase == "ready":  # nothing is exchanged before the script has stepped its optimizers
            fabric.stepped()
            self._models.due = {*self._registered.optimizers}
        else:
            self._forget(model.gradients.parameters)
            for updates in model.updates.values():
                updates.discard()

    @property
    @override
    def stages(self) -> bool:  # type: ignore[override]
        return self._models.shard.stages

    def _clipped(self, gradient: Tensor) -> Tensor:
        """Return a part of a gradient, clipped to `max_norm`."""
        most = self.max_norm
        return gradient if most is None else gradient * clip_factor(self._models.shard.grad_norm, most)

    @override
    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        if norm_type != 2.0:
            raise ConfigError(f"step.clip_grad_norm_(norm_type={norm_type!r}) with shard_size: expected 2.0")
        norm, parameters = self._norm, self._models.shard.gradients.parameters
        self._norm = norm * clip_shards(parameters, max_norm, norm)
        return torch.tensor(norm, dtype=torch.float64)


class ShardedLoopPass(LoopPass):
    """A pass of sharded models, whose workers run a batch each of a row together.

    Args:
        models: of the run.
        given: as of `LoopPass`.
    """

    def __init__(self, models: ShardedModels, *given: Any) -> None:
        super().__init__(*given)
        self._models = models
        self._counted: list[int] = []

    @override
    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with self._models.communicating(), super()._evaluating():
            yield

    @override
    def _operation(self, *, predicts: bool) -> ReplicaEvaluation:
        part, device, fabric = self._models.holder.part, self._models.shard.device, self._models.holder.fabric
        self._models.shard.loaded = self.renew
        name = "prediction" if predicts else ReplicaEvaluation.name
        if not isinstance(self._batches, IndexedBatches):
            self._batches.part = part
            own: Callable[[], bytes] = bytes if predicts else lambda: encode_values(self._values)
            return RowPass(name, fabric, device, self._divide, self._run_all, self._tell, own)
        batches = range(number_of_rows(range(self._batches.number), part.size) * part.size)
        call, results = partial(self._call, self._batches), partial(self._results, predicts=predicts)
        found = ReplicaEvaluation(batches, lambda row: 0, fabric, device, call, results, tells=True, width=part.size)
        found.name = name
        return found

    @override
    def _own_batches(self) -> Collection[int]:
        return self._counted if isinstance(self._batches, IndexedBatches) else self._values

    def _divide(self, reports: ReportSum, replica: int | None, replicas: int) -> bool:
        return self._batches.plan(reports.finished, replica, replicas, self._finished)

    def _run_all(self) -> None:
        for number, counts in self._batches.rows():
            self._run(number, counts=counts)

    def _tell(self) -> Report:
        return {"finished": sorted(self._finished)}

    def _call(self, batches: IndexedBatches, rows: Sequence[int], _: int) -> None:
        """Run some rows forward, together with the partners."""
        own = [self._own(row) for row in rows]
        batches.expect(own)
        for number, counts in own:
            self._run(number, counts=counts)

    def _results(self, rows: Collection[int], *, predicts: bool) -> bytes:
        self._counted = [number for number, counts in map(self._own, rows) if counts]
        return b"" if predicts else encode_values({number: self._values[number] for number in self._counted})

    def _own(self, row: int) -> tuple[int, bool]:
        """Return this worker's batch of a row, and whether it counts."""
        assert isinstance(self._batches, IndexedBatches)
        return self._models.holder.part.own(row, self._batches.number)


def _parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
