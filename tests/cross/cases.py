"""Random cases: a script, and a history of deaths under which it is run; plain values that fit in a line.

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
"""Where a worker may die: hooks, and within the forward or backward of a micro-batch."""
HOOKS: Final = ("half_rates", "rate_at_start", "scaled_weights", "counting", "ema", "swa", "stopping")
STEPS_IN_EPOCH: Final = 6
"""Least number of optimizer steps of an epoch, in a world of two without accumulation."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A death.

    Attributes:
        fit, step, point: when, from 1, 0 and of `POINTS`; the first pass of this point at this step or later.
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
class Script:
    """What is trained, and how.

    Attributes:
        strategy: ``unicron``, or ``unicron_fsdp`` with a worker in each replica.
        workers: of the world.
        optimizer: ``sgd``, ``adam``, ``adamw``, or ``manual``: two, of which one steps in every other batch.
        groups: parameter groups.
        schedule: of the rate: empty, ``step``, ``epoch`` or ``plateau``.
        frozen: a layer that is frozen: empty, ``always``, or ``first``, in the first epoch.
        norm, buffer, dropout, unused: parts of the model.
        clip: norm to which gradients are clipped; 0: none.
        accumulation: batches in a step; 0: by a schedule of epochs.
        data: ``map``, ``stream``, ``both`` or ``budget``, a batch sampler whose number of batches changes.
        samples: of the data.
        fits: number of fits, by one trainer, or with ``trainers=2`` by one each.
        hooks: of `HOOKS`, what callbacks do.
        validation: empty, ``epoch``, ``second`` (every other epoch) or ``steps``.
        saves: empty, ``model``, ``folder`` or ``memory``: kind of checkpoint.
        epochs: of the first fit.
    """

    strategy: str = "unicron"
    workers: int = 2
    optimizer: str = "sgd"
    groups: int = 1
    schedule: str = ""
    frozen: str = ""
    norm: bool = False
    buffer: bool = False
    dropout: bool = False
    unused: bool = False
    clip: float = 0.0
    accumulation: int = 1
    data: str = "map"
    samples: int = 24
    fits: int = 1
    trainers: int = 1
    hooks: tuple[str, ...] = ()
    validation: str = ""
    saves: str = ""
    epochs: int = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script under a history.

    Attributes:
        script: what is trained.
        strikes: deaths, of which some may find no occasion.
        waits: whether survivors wait for each replacement before their next step, so that it joins.
        least: workers of the smallest world; survivors of a smaller one hold.
    """

    script: Script = Script()
    strikes: tuple[Strike, ...] = (Strike(),)
    waits: bool = True
    least: int = 1

    def text(self) -> str:
        """Return the case as a line of JSON, without defaults."""
        script = {key: value for key, value in asdict(self.script).items() if value != getattr(Script(), key)}
        strikes = [
            {key: value for key, value in asdict(each).items() if value != getattr(Strike(), key)}
            for each in self.strikes
        ]
        return json.dumps({"script": script, "strikes": strikes, "waits": self.waits, "least": self.least})

    @classmethod
    def from_text(cls, text: str) -> Case:
        """Return the case of a `text`."""
        values: dict[str, Any] = json.loads(text)
        script = {key: tuple(value) if isinstance(value, list) else value for key, value in values["script"].items()}
        strikes = tuple(Strike(**each) for each in values["strikes"])
        return cls(script=Script(**script), strikes=strikes, waits=values["waits"], least=values["least"])


def draw(seed: int) -> Case:
    """Draw a case."""
    chance = random.Random(seed)
    script = _script(chance)
    dies_all = chance.random() < 0.15
    strikes = [_strike(chance, script) for _ in range(chance.choice((1, 1, 2, 3)))]
    if dies_all:
        strikes[-1] = replace(strikes[-1], rank=-1, joiner=False)
    least = script.workers if chance.random() < 0.3 else 1
    return Case(script=script, strikes=tuple(strikes), waits=chance.random() < 0.8, least=least)


def _script(chance: random.Random) -> Script:
    strategy = chance.choice(("unicron", "unicron", "unicron", "unicron_fsdp"))
    sharded = strategy == "unicron_fsdp"
    optimizer = chance.choice(("sgd", "adam", "adamw") if sharded else ("sgd", "adam", "adamw", "manual"))
    manual = optimizer == "manual"
    # Sums in another order make Adam's normalised steps differ where a gradient is a rounding error: none with eps.
    hooks = [each for each in HOOKS if chance.random() < 0.2]
    if sharded:
        hooks = [each for each in hooks if each not in ("ema", "swa")]
    validation = chance.choice(("", "epoch", "second", "steps"))
    if "stopping" in hooks and not validation:
        validation = "epoch"
    frozen = "" if "swa" in hooks or sharded else chance.choice(("", "", "always", "first"))
    fits = chance.choice((1, 1, 1, 2))
    if "swa" in hooks or "ema" in hooks:
        fits = 1
    data = chance.choice(("map", "map", "stream", "both", "budget"))
    accumulation = 1 if manual else chance.choice((1, 1, 2, 0))
    made = Script(
        strategy=strategy,
        workers=chance.choice((2, 2, 3)),
        optimizer=optimizer,
        groups=1 if manual else chance.choice((1, 2)),
        schedule=chance.choice(("", "step", "epoch") if manual else ("", "step", "epoch", "plateau")),
        frozen=frozen,
        norm=chance.random() < 0.3,
        buffer=chance.random() < 0.3,
        dropout=chance.random() < 0.3,
        unused=chance.random() < 0.2 and not sharded,
        clip=0.0 if manual else chance.choice((0.0, 0.0, 0.5)),
        accumulation=2 if data == "budget" and accumulation == 0 else accumulation,
        data=data,
        samples=chance.choice((24, 23, 29)),
        fits=fits,
        trainers=fits if not sharded and chance.random() < 0.5 else 1,
        hooks=tuple(hooks),
        validation=validation if chance.random() < 0.9 or "stopping" in hooks else "",
        saves=chance.choice(("", "", "model", "folder", "memory")),
        epochs=chance.choice((2, 3)),
    )
    whole = made.data == "map" and made.samples == 24 and not sharded  # a batch of one sample has no variance
    return made if whole else replace(made, norm=False)


def _strike(chance: random.Random, script: Script) -> Strike:
    return Strike(
        fit=chance.randint(1, script.fits),
        step=chance.randrange(0, STEPS_IN_EPOCH * script.epochs),
        point=chance.choice(POINTS),
        rank=chance.randrange(script.workers),
        joiner=chance.random() < 0.15,
        signal=chance.choice((9, 9, 9, 0, 15)) if chance.random() < 0.3 else 9,
    )


def smaller(case: Case) -> Iterator[Case]:
    """Yield cases with one strike less, or one field of the script at its default."""
    for place in range(len(case.strikes) if len(case.strikes) > 1 else 0):
        yield replace(case, strikes=case.strikes[:place] + case.strikes[place + 1 :])
    if case.script.fits > 1:
        yield replace(case, script=replace(case.script, fits=1, trainers=1))
    for hook in case.script.hooks:
        rest = tuple(each for each in case.script.hooks if each != hook)
        yield replace(case, script=replace(case.script, hooks=rest))
    default = Script()
    for field in fields(Script):
        if field.name not in ("hooks", "fits") and getattr(case.script, field.name) != getattr(default, field.name):
            yield replace(case, script=replace(case.script, **{field.name: getattr(default, field.name)}))
