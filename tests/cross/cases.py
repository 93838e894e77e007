"""Random cases: a script, and a history of deaths and orders under which it is run; plain values that fit in a line.

A case is drawn from a seed. Each field of a script has a simple value, its default, to which a failing case is reduced.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

POINTS: Final = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "forward",
    "backward",
    "within_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_start",
    "on_validation_end",
    "on_save_checkpoint",
    "on_train_epoch_end",
    "on_train_end",
)
"""Where a worker may die: hooks, the forward of a micro-batch, and the beginning and the middle of its backward."""
WITHIN_STEPS: Final = POINTS[2:8]
"""Of these: before the end of a step."""
FUNCTIONS: Final = 400
"""Classes into which the product's functions are divided by their names: a worker may die where it calls one."""
ORDERS: Final = ("drain", "resize", "agent", "leave", "everything", "coordinator")
"""What happens to a node or a task beside deaths of workers: its node is drained and allowed again; the task gets a
node less and all again; an agent is killed with its workers, or leaves by SIGTERM, and another one comes; all agents
are killed, and start again; the coordinator is killed, and starts again.
"""
RELAYOUT: Final = "relayout"
"""Two workers hold a replica instead of one, or one instead of two."""
LAYOUTS: Final = {
    "unicron_fsdp": ("shards", "tensor"),
    "unicron_megatron": ("pipeline", "tensor", "context", "virtual", "expert", "biased"),
}
"""How the two workers of a replica divide a model: FSDP2's shards or tensor parallelism; Megatron's stages, also two on
each, slices, parts of each sequence, experts that are balanced by losses or by biases.
"""
WHOLE: Final = ("shampoo", "soap")
"""Optimizers whose updates need whole matrices."""
HOOKS: Final = ("half_rates", "rate_at_start", "scaled_weights", "counting", "ema", "swa", "stopping", "stop")
STEPS_IN_EPOCH: Final = 6
"""Least number of optimizer steps of an epoch, in a world of two without accumulation."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A death.

    Attributes:
        fit, step, point: when, from 1, 0 and of `POINTS`; the first pass of this point at this step or later. Or the
            number of a class of functions, below `FUNCTIONS`, as text.
        rank: whose; -1: of all ranks.
        joiner: whether only a worker that has taken another's place dies.
        signal: its number; 0: an error that the script raises.
    """

    fit: int = 1
    step: int = 3
    point: str = "on_train_batch_start"
    rank: int = 1
    joiner: bool = False
    signal: int = 9


@dataclass(frozen=True, kw_only=True)
class Order:
    """What happens beside deaths of workers.

    Attributes:
        fit, step: when: at the start of this step, or a later one that is the first.
        kind: of `ORDERS`, or `RELAYOUT`.
        node: number of the node that it concerns.
    """

    fit: int = 1
    step: int = 3
    kind: str = "drain"
    node: int = 1


@dataclass(frozen=True, kw_only=True)
class Script:
    """What is trained, and how.

    Attributes:
        strategy: ``unicron``, ``unicron_fsdp`` or ``unicron_megatron``, whose replicas are pipelines.
        shard_size: workers of a replica.
        layout: of `LAYOUTS`, how they divide the model; empty: the first one.
        witness: whether each step is compared with what another worker computes.
        zero: whether the optimizer's state is divided among replicas (Megatron's distributed optimizer).
        buckets: whether gradients are reduced in many buckets, while others are computed (Megatron's overlap).
        workers: of the world.
        optimizer: ``sgd``, ``adam``, ``adamw``, one of `WHOLE`, or ``manual``: two; one steps in every other batch.
        own: whether the LightningModule has a parameter itself, which is not sharded.
        groups: parameter groups.
        schedule: of the rate: empty, ``step``, ``epoch`` or ``plateau``.
        frozen: a layer that is frozen: empty, ``always``, or ``first``, in the first epoch.
        norm, buffer, dropout, unused: parts of the model.
        tied: whether the model's two outer layers share a weight.
        scaler: whether gradients are scaled; one of them overflows now and then.
        clip: norm to which gradients are clipped; 0: none.
        accumulation: batches in a step; 0: by a schedule of epochs.
        data: ``map``, ``stream``, ``both`` or ``budget``, a batch sampler whose number of batches changes.
        samples: of the data.
        fits: number of fits, by one trainer, or with ``trainers=2`` by one each.
        hooks: of `HOOKS`, what callbacks do.
        validation: empty, ``epoch``, ``second`` (every other epoch) or ``steps``.
        saves: empty, ``model``, ``folder`` or ``memory``: kind of checkpoint.
        resumes: whether the first fit has the ``ckpt_path`` of another run's checkpoint after one epoch.
        returns: whether the last fit has it.
        epochs: of the first fit.
        limit: most batches of a device in an epoch; 0: none.
        most_steps: of the fit; 0: no limit.
        reload: whether a data module gives the data again in each epoch.
        metric: whether a torchmetrics metric is logged.
        after: whether a validation follows the fits.
        reproducible: whether the strategy is, so that all bits must be equal.
        mixed: whether precision is bf16-mixed, whose parameters are float32.
    """

    strategy: str = "unicron"
    shard_size: int = 1
    layout: str = ""
    witness: bool = False
    zero: bool = False
    buckets: bool = False
    workers: int = 2
    optimizer: str = "sgd"
    own: bool = False
    groups: int = 1
    schedule: str = ""
    frozen: str = ""
    norm: bool = False
    buffer: bool = False
    dropout: bool = False
    unused: bool = False
    tied: bool = False
    scaler: bool = False
    clip: float = 0.0
    accumulation: int = 1
    data: str = "map"
    samples: int = 24
    fits: int = 1
    trainers: int = 1
    hooks: tuple[str, ...] = ()
    validation: str = ""
    saves: str = ""
    resumes: bool = False
    returns: bool = False
    epochs: int = 2
    limit: int = 0
    most_steps: int = 0
    reload: bool = False
    metric: bool = False
    after: bool = False
    reproducible: bool = False
    mixed: bool = False

    @property
    def double(self) -> bool:
        """Whether the model is in float64; Megatron's distributed optimizer and its clipping take float32 only."""
        return self.strategy != "unicron_megatron" or not (self.zero or self.clip)

    @property
    def experts(self) -> bool:
        """Whether the model has experts, whose workers have micro-batches of their own."""
        return self.layout in ("expert", "biased")

    @property
    def devices(self) -> int:
        """Micro-batches of a round: of workers that divide one only the first counts."""
        shared = self.strategy == "unicron_megatron" and not self.experts
        return self.workers // (self.shard_size if shared or self.layout == "tensor" else 1)

    def made_plain(self) -> Script:
        """Return a script that Lightning alone runs alike in one process.

        It does not if batches have state of their own (statistics, random numbers), are joined from several loaders,
        or change in number.
        """
        unequal = {"swa", "stopping", *(("stop",) if self.fits > 1 or self.resumes else ())}
        return replace(
            self,
            norm=False,
            buffer=False,
            dropout=False,
            optimizer="adamw" if self.optimizer == "manual" else self.optimizer,
            # Lightning refuses a second fit with a schedule of accumulation.
            accumulation=self.accumulation or (2 if self.fits > 1 else 0),
            data={"both": "map", "budget": "stream"}.get(self.data, self.data),
            witness=self.witness and (self.data == "map" or self.strategy == "unicron"),
            validation="epoch" if self.validation == "steps" else self.validation,
            hooks=tuple(each for each in self.hooks if each not in unequal),
        )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script under a history.

    Attributes:
        script: the training.
        strikes: deaths; some may find no occasion.
        orders: what else happens.
        waits: whether survivors wait for each replacement before their next step, so that it joins.
        least: workers of the smallest world; survivors of a smaller one hold.
        plain: whether it is compared with Lightning alone; else with the strategy in one process.
        planted: a fault of `planted.FAULTS` that the product has again.
    """

    script: Script = Script()
    strikes: tuple[Strike, ...] = (Strike(),)
    orders: tuple[Order, ...] = ()
    waits: bool = True
    least: int = 1
    plain: bool = False
    planted: str = ""

    def made_exact(self) -> Case:
        """Return the case whose worlds must have the bits of one process; those of a shard depend on their number."""
        sharded = self.script.strategy == "unicron_fsdp"
        script = replace(self.script, reproducible=True, shard_size=1, layout="")
        script = replace(script, workers=min(script.workers, 3)) if sharded else script
        rest = min(self.least, script.workers)
        return replace(self, script=script, plain=False, least=rest)

    def text(self) -> str:
        """Return the case as a line of JSON, without defaults."""
        values: dict[str, Any] = {"script": _changed(self.script), "strikes": [_changed(each) for each in self.strikes]}
        values |= {"orders": [_changed(each) for each in self.orders]} if self.orders else {}
        rest = {name: getattr(self, name) for name in ("waits", "least", "plain", "planted")}
        return json.dumps(values | {name: value for name, value in rest.items() if value != getattr(Case(), name)})

    @classmethod
    def from_text(cls, text: str) -> Case:
        """Return the case of a `text`."""
        values: dict[str, Any] = json.loads(text)
        script = {key: tuple(value) if isinstance(value, list) else value for key, value in values["script"].items()}
        parts: dict[str, Any] = {
            "script": Script(**script),
            "strikes": tuple(Strike(**each) for each in values["strikes"]),
            "orders": tuple(Order(**each) for each in values.get("orders", ())),
        }
        return cls(**{**values, **parts})


def _changed(part: Any) -> dict[str, Any]:
    default = type(part)()
    return {key: value for key, value in asdict(part).items() if value != getattr(default, key)}


def draw(seed: int, *, megatron: bool = False, exact: bool = False) -> Case:
    """Draw a case, of megatron-core or with the bits of one process if wanted."""
    chance = random.Random(seed)
    plain = not megatron and not exact and chance.random() < 0.4
    script = _megatron(chance) if megatron else _script(chance)
    script = _divided(random.Random(f"layout {seed}"), script)
    script = _whole(random.Random(f"whole {seed}"), script)
    script = script.made_plain() if plain else script
    if exact:
        mixed = not (script.scaler or script.strategy == "unicron_fsdp") and chance.random() < 0.3
        workers = chance.choice((2, 2, 3, 3, 4, 6))
        script = replace(Case(script=replace(script, workers=workers)).made_exact().script, mixed=mixed)
    strikes = [_strike(chance, script, later=place > 0) for place in range(chance.choice((1, 1, 2, 2, 3)))]
    if script.shard_size > 1 and len(strikes) > 1 and chance.random() < 0.8:
        strikes = _at_once(chance, strikes)
    if chance.random() < (0.15 if script.fits == 1 else 0.3):
        strikes[-1] = replace(strikes[-1], rank=-1, joiner=False)
    orders: list[Order] = []
    if chance.random() < 0.25:
        orders = [_order(chance, script) for _ in range(chance.choice((1, 1, 2)))]
        strikes = strikes[: chance.randrange(3)]
        orders = [each for each in orders if not (exact and each.kind == RELAYOUT)]  # other shards have other bits
    least = script.workers if chance.random() < 0.3 else script.shard_size
    if any(each.kind in ("drain", "resize", RELAYOUT) for each in orders):
        relayout = any(each.kind == RELAYOUT for each in orders)
        least = max(script.shard_size, 2 * relayout)  # with fewer it is refused
        # Megatron's random numbers depend on the place in the layout.
        script = replace(script, dropout=script.dropout and not (megatron and relayout))
    waits = chance.random() < 0.8
    return Case(script=script, strikes=tuple(strikes), orders=tuple(orders), waits=waits, least=least, plain=plain)


def _script(chance: random.Random) -> Script:
    strategy = chance.choice(("unicron", "unicron", "unicron", "unicron_fsdp", "unicron_fsdp"))
    sharded = strategy == "unicron_fsdp"
    optimizer = chance.choice(("sgd", "adam", "adamw") if sharded else ("sgd", "adam", "adamw", "manual"))
    manual = optimizer == "manual"
    # Sums in another order make Adam's normalised steps differ where a gradient is a rounding error: none with eps.
    hooks = [each for each in HOOKS if chance.random() < 0.2]
    if sharded or manual:
        hooks = [each for each in hooks if each != "swa" and (manual or each != "ema")]
    validation = chance.choice(("", "epoch", "second", "steps"))
    if "stopping" in hooks and not validation:
        validation = "epoch"
    fits = 1 if "swa" in hooks or "ema" in hooks else chance.choice((1, 1, 2))
    data = chance.choice(("map", "map", "stream", "both", "budget"))
    accumulation = 1 if manual else chance.choice((1, 1, 2, 0))
    shard_size = chance.choice((1, 2, 2)) if sharded else 1
    scaler = not sharded and not manual and "swa" not in hooks and chance.random() < 0.15
    made = Script(
        strategy=strategy,
        shard_size=shard_size,
        workers=4 if shard_size == 2 else chance.choice((2, 2, 3)),
        optimizer=optimizer,
        groups=1 if manual else chance.choice((1, 2)),
        schedule=chance.choice(("", "step", "epoch") if manual else ("", "step", "epoch", "plateau")),
        frozen="" if "swa" in hooks or sharded else chance.choice(("", "", "always", "first")),
        norm=chance.random() < 0.2,
        buffer=chance.random() < 0.2,
        dropout=chance.random() < 0.2,
        unused=chance.random() < 0.2 and not sharded,
        tied=chance.random() < 0.2,
        scaler=scaler,
        clip=0.0 if manual else chance.choice((0.0, 0.0, 0.5)),
        accumulation=2 if data == "budget" and accumulation == 0 else accumulation,
        data=data,
        samples=chance.choice((24, 23, 29)),
        fits=fits,
        trainers=fits if not sharded and chance.random() < 0.7 else 1,
        hooks=tuple(hooks),
        validation=validation if chance.random() < 0.9 or "stopping" in hooks else "",
        saves=chance.choice(("", "", "model", "model", "folder", "memory", "memory")),
        resumes=chance.random() < 0.15,
        epochs=chance.choice((2, 3)),
        limit=chance.choice((0, 0, 0, 0, 4)),
        most_steps=chance.choice((0, 0, 0, 0, 7)) if fits == 1 else 0,
        reload=chance.random() < 0.15,
        metric=not sharded and chance.random() < 0.2,
        after=chance.random() < 0.15,
    )
    return _mended(made)


def _divided(chance: random.Random, script: Script) -> Script:
    """Return a script with a layout of its model, and some with a witness."""
    layouts = LAYOUTS.get(script.strategy, ("",))
    layout = chance.choice(layouts) if script.shard_size > 1 and chance.random() < 0.8 else layouts[0]
    layout = "" if layout == layouts[0] else layout
    indexed, manual = script.data in ("map", "budget"), script.optimizer == "manual"
    refused = layout in ("virtual", "expert", "biased") or (not indexed and (manual or script.strategy != "unicron"))
    witness = chance.random() < 0.3 and not refused
    several = script.strategy == "unicron_megatron" and "stop" not in script.hooks and chance.random() < 0.3
    fits = 2 if several else script.fits
    returns = fits == 2 and chance.random() < 0.4
    script = replace(script, layout=layout, witness=witness, fits=fits, returns=returns)
    if script.strategy == "unicron_fsdp" and layout:
        # A lane's two weights of one layer are divided in two ways.
        script = replace(script, tied=False, norm=False)
    elif layout:
        # Megatron has other groups of parameters where workers divide experts; the first one is not the same.
        hooks = tuple(each for each in script.hooks if each != "rate_at_start" or layout not in ("expert", "biased"))
        script = replace(script, tied=script.tied and layout != "virtual", hooks=hooks)
    return script


def _whole(chance: random.Random, script: Script) -> Script:
    """Return a script of shards that has undivided parameters, updates of whole matrices, or several trainers."""
    if script.strategy != "unicron_fsdp":
        return script
    own, unused, updates, trainers = (chance.random() < each for each in (0.3, 0.2, 0.3, 0.5))
    optimizer = chance.choice(WHOLE) if updates else script.optimizer
    return replace(script, own=own, unused=unused, optimizer=optimizer, trainers=script.fits if trainers else 1)


def _mended(script: Script) -> Script:
    """Return a script without what does not fit the rest of it."""
    # A batch of one sample has no variance, and a fit without a step does not wait for its second worker.
    whole = script.data == "map" and script.samples == 24 and script.strategy != "unicron_fsdp"
    return replace(
        script,
        norm=script.norm and whole,
        after=script.after and bool(script.validation),
        # EarlyStopping looks at its metric at the end of an epoch, which may then be before the first validation.
        most_steps=0 if script.resumes or "stopping" in script.hooks else script.most_steps,
    )


def _megatron(chance: random.Random) -> Script:
    shard_size = chance.choice((1, 2, 2))
    optimizer = chance.choice(("sgd", "adam", "adamw"))
    zero = optimizer != "sgd" and chance.random() < 0.4
    return Script(
        strategy="unicron_megatron",
        shard_size=shard_size,
        zero=zero,
        buckets=chance.random() < 0.3,
        workers=4 if shard_size == 2 else chance.choice((2, 2, 3)),
        optimizer=optimizer,
        schedule=chance.choice(("", "step", "epoch")),
        dropout=shard_size == 1 and chance.random() < 0.2,
        tied=chance.random() < 0.3,
        clip=chance.choice((0.0, 0.0, 0.5)),
        accumulation=chance.choice((1, 1, 2)),
        data=chance.choice(("map", "map", "stream", "both")),
        samples=chance.choice((24, 23, 29)),
        hooks=tuple(each for each in ("half_rates", "rate_at_start", "counting", "stop") if chance.random() < 0.2),
        validation=chance.choice(("", "epoch", "second", "steps")),
        saves=chance.choice(("", "model", "model", "folder", "memory", "memory")),
        resumes=chance.random() < 0.15,
        epochs=chance.choice((2, 3)),
    )


def _strike(chance: random.Random, script: Script, *, later: bool) -> Strike:
    validates, saves = bool(script.validation), script.saves in ("model", "folder")
    points = [each for each in POINTS if ("valid" not in each or validates) and ("save" not in each or saves)]
    point = chance.choice(points) if chance.random() < 0.5 else str(chance.randrange(FUNCTIONS))
    return Strike(
        fit=chance.randint(1, script.fits + (script.after and "valid" in point)),
        step=chance.randrange(0, _steps(script)),
        point=point,
        rank=chance.randrange(script.workers),
        joiner=later and chance.random() < 0.3,
        # An error after the last step is the task's, if another worker has finished.
        signal=9 if point not in WITHIN_STEPS else chance.choice((9, 9, 9, 9, 9, 9, 9, 9, 0, 15)),
    )


def _at_once(chance: random.Random, strikes: list[Strike]) -> list[Strike]:
    """Return strikes in one step; the first two leave one holder of each shard, which then meet in a replica."""
    points = ("forward", "backward", "within_backward", "within_backward", "on_train_batch_start")
    step = strikes[0].step
    ranks = [*chance.choice(((0, 3), (3, 0), (1, 2), (2, 1))), *(each.rank for each in strikes[2:])]
    rows = zip(strikes, ranks, strict=True)
    return [
        replace(each, fit=1, step=step, point=chance.choice(points), rank=rank, joiner=False) for each, rank in rows
    ]


def _steps(script: Script) -> int:
    """Return a number of steps that the first fit has at least."""
    steps = min(STEPS_IN_EPOCH, script.limit or STEPS_IN_EPOCH) * script.epochs // max(1, script.accumulation) - 2
    return max(1, min(steps, 8 if "stop" in script.hooks else steps, script.most_steps or steps))


def _order(chance: random.Random, script: Script) -> Order:
    return Order(
        fit=chance.randint(1, script.fits),
        step=chance.randrange(0, _steps(script)),
        kind=chance.choice(
            (*ORDERS, RELAYOUT, RELAYOUT) if script.strategy != "unicron" and not script.layout else ORDERS
        ),
        node=chance.randrange(script.workers),
    )


def smaller(case: Case) -> Iterator[Case]:
    """Yield cases with one strike or order less, or one field of the script at its default."""
    for name in ("strikes", "orders"):
        parts = getattr(case, name)
        for place in range(len(parts) if len(case.strikes) + len(case.orders) > 1 else 0):
            yield replace(case, **{name: parts[:place] + parts[place + 1 :]})
    if case.script.fits > 1:
        yield replace(case, script=replace(case.script, fits=1, trainers=1))
    for hook in case.script.hooks:
        rest = tuple(each for each in case.script.hooks if each != hook)
        yield replace(case, script=replace(case.script, hooks=rest))
    default = Script()
    for field in fields(Script):
        if field.name not in ("hooks", "fits", "shard_size") and getattr(case.script, field.name) != getattr(
            default, field.name
        ):
            changed = {field.name: getattr(default, field.name)}
            if field.name in ("strategy", "workers"):
                changed |= {"shard_size": 1, "layout": ""}
            yield replace(case, script=replace(case.script, **changed))
