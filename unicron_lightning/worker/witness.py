"""Silent corruption: another rank repeats a micro-batch, and the gradients' bits are compared before the commit.

In every k-th step each rank repeats one micro-batch of another rank, while the reductions are on their way. Before the
commit all ranks exchange digests of the gradients. Owners, witnesses and places in the shares rotate, so that each pair
of ranks meets in size - 1 such steps.

If two digests of one micro-batch differ, there is no commit. Every rank runs the micro-batch twice more, and `judge`
decides from all runs which ranks are wrong. These end with `SilentCorruption`. The others wait for the epoch after
their end, in which they discard all reductions of the step, and compute the micro-batches of the ranks that ended: what
a wrong rank has contributed to the step never reaches the model. A rank in a step with a witness therefore reports no
completed reduction after a failure (`GradientStep.report`), whatever caused it and whether or not it knows of a
difference. Finished micro-batches of survivors are kept as ever.

A repeated micro-batch leaves nothing behind: gradients are set aside, and effects, values and losses are dropped.

This finds a rank whose gradients differ from those of other ranks. It does not find errors that all ranks share, errors
outside forward and backward (the reduction, the optimizer; see `Divergence`), and those of micro-batches that no
witness repeats.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import torch
from torch.utils.data import IterableDataset

from unicron_lightning.errors import ConfigError, SilentCorruption, UnicronError
from unicron_lightning.worker.agreement import StateDigest, parts_of
from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine, EpochChanged
from unicron_lightning.worker.reproducible import conditions

logger = logging.getLogger(__name__)

AGAIN: Final = 2
"""Runs of a micro-batch in doubt on each rank: two of one rank that differ are no property of the micro-batch."""

Runs = Mapping[int, Sequence[int]]
"""Digests of the gradients of one micro-batch, in the order of the runs, by rank."""


class GradientsDiffer(UnicronError):
    """The ranks' gradients of a micro-batch differ, and no majority decides which are wrong."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The decision about one micro-batch.

    Attributes:
        wrong: ranks of which a run differs from the right result, in order; empty without a decision.
        steady: whether any rank has the same result in all of its runs.
    """

    wrong: tuple[int, ...]
    steady: bool


def judge(runs: Runs) -> Judgement:
    """Decide which ranks are wrong. Pure.

    The right result is that of more than half of the steady ranks: those whose own runs agree. So of two ranks one is
    found whose runs differ among themselves, and of three or more also one that is wrong in the same way each time.
    """
    steady = Counter(values[0] for values in runs.values() if len(set(values)) == 1)
    right, number = steady.most_common(1)[0] if steady else (None, 0)
    if 2 * number <= steady.total():
        return Judgement(wrong=(), steady=bool(steady))
    return Judgement(wrong=tuple(sorted(rank for rank, values in runs.items() if {*values} != {right})), steady=True)


def in_doubt(ranks: Sequence[Mapping[int, Sequence[int]]]) -> list[int]:
    """Return the micro-batches of which two runs differ, given the digests of each rank's runs by micro-batch."""
    found: dict[int, set[int]] = {}
    for each in ranks:
        for micro_batch, values in each.items():
            found.setdefault(micro_batch, set()).update(values)
    return sorted(micro_batch for micro_batch, values in found.items() if len(values) > 1)


class Witness:
    """The comparison of gradients of a run, from step to step.

    Args:
        every: steps between two with witnesses, k; None or 0: there are none.
        compare: whether the workers' settings and processors are compared, too.

    Attributes:
        every: as above, 0 for never.
        right: the last step, from 1, in which each worker was compared and found right, by its name.

    Raises:
        ConfigError: ``every`` is no number of steps, or workers are not compared.
    """

    def __init__(self, every: int | None, *, compare: bool) -> None:
        if every is not None and (type(every) is not int or every < 0):
            raise ConfigError(f"witness_every={every!r}: expected a number of steps, or 0 for never")
        if every and not compare:
            raise ConfigError(
                f"witness_every={every} with compare=False: workers of different kinds would not be found"
            )
        self.every = every or 0
        self.right: dict[str, int] = {}

    def check_data(self, dataset: object) -> None:
        """Refuse streams: a witness would have to read those of other ranks.

        Raises:
            ConfigError: there is a witness, and the data set has no index.
        """
        if self.every and isinstance(dataset, IterableDataset):
            kind = type(dataset).__qualname__
            raise ConfigError(
                f"witness_every={self.every} with iterable data ({kind}): expected a data set with an index"
            )

    def of_step(self, done: int, gradients: GradientBuckets, repeat: Callable[[int], None]) -> WitnessedStep | None:
        """Return the witness of a step; None if it has none.

        Args:
            done: number of finished steps.
            gradients: of the step.
            repeat: runs forward and backward of a micro-batch, and drops all but the gradients.
        """
        if not self.every or (done + 1) % self.every:
            return None
        return WitnessedStep(self, done + 1, gradients, repeat)

    def conditions(self, device: torch.device) -> dict[str, str]:
        """Describe what all workers must share, so that their bits are equal, for a device of the model."""
        if not self.every:
            return {}
        shared = {name: value for name, value in conditions(device).items() if name != "reproducible"}
        return {**shared, "witness_every": str(self.every)}

    def announced(self, workers: int) -> str:
        """Return the line that states at the start what is compared.

        Args:
            workers: number of them.
        """
        start = f"witness_every={self.every}:"
        if workers == 1:
            return f"{start} one worker has no witness, so nothing is compared until another one joins"
        return f"{start} in every {self.every}. step each of {workers} ranks repeats a micro-batch of another one"


class WitnessedStep:
    """A step in which ranks repeat micro-batches of others.

    Args:
        witness: whose step it is.
        number: of the step, from 1.
        gradients, repeat: as of `Witness.of_step`.

    Attributes:
        own: the micro-batch of this rank that another one repeats; None without one.
    """

    def __init__(
        self,
        witness: Witness,
        number: int,
        gradients: GradientBuckets,
        repeat: Callable[[int], None],
    ) -> None:
        self.own: int | None = None
        self._other: int | None = None
        self._witness, self._number = witness, number
        self._gradients, self._repeat = gradients, repeat
        self._runs: dict[int, list[int]] = {}
        self._owned: Callable[[int], int | None] | None = None
        """Given a rank of ``_workers``, returns which of its micro-batches another one repeats."""
        self._workers: Sequence[str] = ()
        """The workers for which the step was planned, by rank."""
        self._error: UnicronError | None = None
        self._among: Sequence[str] = ()
        """The workers that cannot decide: each has to end by ``_error``."""

    def plan(self, rank: int, ranks: int, share: Callable[[int], Sequence[int]]) -> None:
        """Plan a step of which no micro-batch is finished; after a failure, what has been planned stays.

        Args:
            rank: of this worker.
            ranks: number of them.
            share: returns the micro-batches of a rank.
        """
        if ranks == 1:
            return
        turn = self._number // self._witness.every
        place, shift = divmod(turn, ranks - 1)

        def owned(rank: int) -> int | None:
            own = share(rank)
            return own[place % len(own)] if own else None

        self._owned, self._workers = owned, ()
        self.own, self._other = owned(rank), owned((rank + 1 + shift) % ranks)

    def enter(self, engine: Engine) -> None:
        """Begin an attempt of what is planned; after a death each rank repeats that of the next present one."""
        workers = engine.world.workers
        if self._owned is None or not self._workers:
            self._workers = workers
        elif self._workers != workers and len(workers) > 1:
            following = workers[(engine.world.rank + 1) % len(workers)]
            self._other = self._owned(self._workers.index(following))

    def observe(self, run: Callable[[int], None], micro_batch: int) -> None:
        """Run a micro-batch of this rank, and keep the digest of its gradients alone."""
        with self._gradients.apart(adds=True):
            run(micro_batch)
            self._record(micro_batch)

    def repeat(self, engine: Engine) -> None:
        """Run another rank's micro-batch, once."""
        if self._other is not None and self._other not in self._runs:
            engine.check()
            self._run_again(engine, self._other)

    def compare(self, engine: Engine) -> None:
        """Compare the gradients before the commit.

        Raises:
            SilentCorruption: this rank is wrong.
            EpochChanged: another rank is, and has ended.
            GradientsDiffer: it is not known which ranks are wrong; raised on all.
            ConfigError: no rank has the same gradients twice; raised on all.
        """
        if self._error is not None and not {*self._among} <= {*engine.world.workers}:
            raise self._error  # another rank has ended by it already
        if engine.world.size == 1:
            return
        engine.activity.enter("commit")
        found = self._gather(engine)
        engine.fault("compared", engine.step)
        doubtful = in_doubt(found)
        if not doubtful:
            self._trust(engine, found)
            return
        logger.warning("gradients_differ step=%d micro_batches=%s", self._number, doubtful)
        for micro_batch in doubtful * AGAIN:
            engine.check()
            self._run_again(engine, micro_batch)
        engine.activity.enter("commit")
        found = self._gather(engine)
        self._decide(engine, {number: {r: each[number] for r, each in enumerate(found)} for number in doubtful})

    def _run_again(self, engine: Engine, micro_batch: int) -> None:
        with self._gradients.apart(adds=False):
            self._repeat(micro_batch)
            self._record(micro_batch)
        engine.activity.computed()

    def _record(self, micro_batch: int) -> None:
        parts = parts_of(self._gradients.present())
        self._runs.setdefault(micro_batch, []).append(int(StateDigest(parts=parts).row[0]))

    def _gather(self, engine: Engine) -> list[dict[int, list[int]]]:
        own = msgspec.msgpack.encode(self._runs)
        parts = gather_bytes(engine.communicator, own, engine.tag("witness"))
        return [msgspec.msgpack.decode(part, type=dict[int, list[int]]) for part in parts]

    def _trust(self, engine: Engine, found: Sequence[Mapping[int, Sequence[int]]]) -> None:
        """Remember the ranks that have been compared."""
        known = Counter(micro_batch for each in found for micro_batch in each)
        for worker, each in zip(engine.world.workers, found, strict=True):
            if any(known[micro_batch] > 1 for micro_batch in each):
                self._witness.right[worker] = self._number

    def _decide(self, engine: Engine, found: Mapping[int, Runs]) -> None:
        world, control = engine.world, engine.control
        verdicts = {number: judge(runs) for number, runs in found.items()}
        wrong = sorted({rank for each in verdicts.values() for rank in each.wrong})
        if len(wrong) in {0, world.size}:  # all: rather the data differ from run to run than every processor is broken
            error = self._undecided(engine, found, repeats=any(each.steady for each in verdicts.values()))
            self._error, self._among = error, world.workers
            # Only once all know it may one end: the others would continue without it, perhaps with a wrong result.
            gather_bytes(engine.communicator, b"", engine.tag("verdict"))
            raise error
        logger.warning(
            "corruption_found step=%d ranks=%s nodes=%s", self._number, wrong, [world.nodes[r] for r in wrong]
        )
        if world.rank in wrong:
            first = next(number for number, each in verdicts.items() if world.rank in each.wrong)
            raise self._corruption(engine, first, len(wrong))
        assert control is not None
        with control.condition:
            control.condition.wait_for(lambda: control.failed_since(world.epoch))
        raise EpochChanged(f"ranks {wrong} have computed wrong gradients")

    def _corruption(self, engine: Engine, micro_batch: int, wrong: int) -> SilentCorruption:
        world, number = engine.world, self._number
        worker, node, host, device = world.workers[world.rank], world.nodes[world.rank], socket.gethostname(), "cpu"
        placed = self._gradients.parameters[0].device
        if placed.type == "cuda":
            device = f"{placed} ({torch.cuda.get_device_name(placed)})"
        last = next((step for step in [self._witness.right.get(worker, number)] if step < number), None)
        since = number if last is None else number - last
        trusted = "never compared before" if last is None else f"last found right {since} steps before"
        return SilentCorruption(
            # Tables of incidents cut long causes, so the suspect comes first.
            f"rank {world.rank} on node {node} (host {host}, device {device}), {trusted}, has computed a wrong "
            f"gradient in step {number}, of micro-batch {micro_batch}: {world.size - wrong} of {world.size} ranks have "
            f"other bits. The step does without it, and its node gets no workers until: unicron undrain {node}",
            suspect={
                "rank": world.rank,
                "node": node,
                "host": host,
                "device": device,
                "step": number,
                "micro_batch": micro_batch,
                "last_right": last,
                "steps_since_right": since,
            },
        )

    def _undecided(self, engine: Engine, found: Mapping[int, Runs], *, repeats: bool) -> UnicronError:
        what = f"in step {self._number} the gradients of micro-batches {sorted(found)} differ"
        if not repeats:
            return ConfigError(
                f"witness_every={self._witness.every}: {what} each time that they are computed, on all ranks. Expected "
                "that they are functions of the parameters, the samples and the seed: look for other state in the "
                "script, for random numbers of its own generators, and for kernels that are not deterministic"
            )
        where = ", ".join(f"rank {rank} on node {node}" for rank, node in enumerate(engine.world.nodes))
        return GradientsDiffer(
            f"{what} between {where}, and it is not known which are wrong. The task "
            "restarts from its newest checkpoint. With three workers or more the wrong one is found"
        )
