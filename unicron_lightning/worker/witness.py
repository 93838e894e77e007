"""Silent corruption: another rank repeats a micro-batch, and the gradients' bits are compared before the commit.

Of models in shards a replica repeats a row of another one, and each worker compares its shard's gradients. Ranks below
are then replicas, and all workers of a wrong one are.

In every k-th step each rank repeats one micro-batch of another rank, while the reductions are on their way. Before the
commit all ranks exchange digests of the gradients. Owners, witnesses and places in the shares rotate, so that each pair
of ranks meets in size - 1 such steps.

If two digests of one micro-batch differ, there is no commit. Every rank runs the micro-batch twice more, and `judge`
decides from all runs which ranks are wrong. These end with `SilentCorruption`. The others wait for the epoch after
their end, in which they discard all reductions of the step, and compute the micro-batches of the ranks that ended: what
a wrong rank has contributed to the step never reaches the model. A rank in a step with a witness therefore reports no
completed reduction after a failure (`GradientStep.report`), whatever caused it and whether or not it knows of a
difference. Finished micro-batches of survivors are kept as ever.

Samples of streams are handed from rank to rank: a witness does not read the streams of others.

A repeated micro-batch leaves nothing behind: gradients are set aside, and effects, values and losses are dropped.

This finds a rank whose gradients differ from those of other ranks. It does not find errors that all ranks share, errors
outside forward and backward (the reduction, the optimizer; see `Divergence`), and those of micro-batches that no
witness repeats.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.errors import ConfigError, GradientsDiffer, SilentCorruption, UnicronError
from unicron_lightning.worker import codec
from unicron_lightning.worker.agreement import StateDigest, part_of, parts_of
from unicron_lightning.worker.communication.communicator import Route, gather_bytes
from unicron_lightning.worker.engine import Engine, EpochChanged
from unicron_lightning.worker.reproducible import conditions
from unicron_lightning.worker.rows import Report

logger = logging.getLogger(__name__)

AGAIN: Final = 2
"""Runs of a micro-batch in doubt on each rank: two of one rank that differ are no property of the micro-batch."""

Runs = Mapping[int, Sequence[Hashable]]
"""Digests of the gradients of one micro-batch, in the order of the runs, by rank."""
OwnRuns = Mapping[int, Sequence[Hashable]]
"""Those of one rank, by micro-batch."""


class ComparedGradients(Protocol):
    """This worker's gradients; implemented by `GradientBuckets` and `ShardedGradients`."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Those that are trained."""

    def apart(self, *, adds: bool) -> AbstractContextManager[None]:
        """Inside, gradients begin without those before, which are added at the end, or come back."""

    def present(self) -> dict[str, Tensor]:
        """Return the gradients that this worker has at present, by name."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The decision about one micro-batch.

    Attributes:
        wrong: ranks with a run that differs from the right result, in order; empty without a decision.
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


def in_doubt(ranks: Sequence[OwnRuns]) -> list[int]:
    """Return the micro-batches with two runs that differ, given the digests of each rank's runs by micro-batch."""
    found: dict[int, set[Hashable]] = {}
    for each in ranks:
        for micro_batch, values in each.items():
            found.setdefault(micro_batch, set()).update(values)
    return sorted(micro_batch for micro_batch, values in found.items() if len(values) > 1)


def together(shards: Sequence[Mapping[int, Sequence[int]]]) -> dict[int, list[tuple[int, ...]]]:
    """Return the runs of a replica, given those of its workers, which a failure may have left with different numbers.

    A micro-batch that a worker has not run, since it was a spare, is left out.
    """
    found = {}
    for number in set.intersection(*(set(each) for each in shards)):
        known = min(len(each[number]) for each in shards)
        found[number] = list(zip(*(each[number][-known:] for each in shards), strict=True))
    return found


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
        """Refuse streams, of models in shards and with manual optimization.

        Raises:
            ConfigError: there is a witness, and the data set has no index.
        """
        if self.every and isinstance(dataset, IterableDataset):
            kind = type(dataset).__qualname__
            raise ConfigError(
                f"witness_every={self.every} with iterable data ({kind}): expected a data set with an index, as with "
                "all models in shards and manual optimization"
            )

    def of_step(
        self,
        done: int,
        gradients: ComparedGradients,
        repeat: Callable[[int], None],
        batch: GlobalBatch | None = None,
    ) -> WitnessedStep | None:
        """Return the witness of a step; None if it has none.

        Args:
            done: number of finished steps.
            gradients: of the step.
            repeat: runs forward and backward of a micro-batch, and drops all but the gradients.
            batch: has the samples of whole models, which may be those of streams.
        """
        if not self.every or (done + 1) % self.every:
            return None
        step = WitnessedStep(self, done + 1, gradients, repeat)
        if batch is not None and batch.is_stream:
            step.hand_samples_of(batch)
        return step

    def conditions(self, device: torch.device) -> dict[str, str]:
        """Describe what all workers must share, so that their bits are equal, for a device of the model."""
        if not self.every:
            return {}
        shared = {name: value for name, value in conditions(device).items() if name != "reproducible"}
        return {**shared, "witness_every": str(self.every)}

    def announced(self, workers: int, size: int = 1) -> str:
        """Return the line that describes the comparison at the start.

        Args:
            workers: number of them.
            size: of them in a replica.
        """
        start, number = f"witness_every={self.every}:", workers // size
        if number <= 1:
            what = "worker" if size == 1 else "replica"
            return f"{start} one {what} has no witness, so nothing is compared until another one joins"
        what = f"{number} ranks repeats a micro-batch" if size == 1 else f"{number} replicas repeats a row"
        return f"{start} in every {self.every}. step each of {what} of another one"


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
        gradients: ComparedGradients,
        repeat: Callable[[int], None],
    ) -> None:
        self.own: int | None = None
        self._other: int | None = None
        self._witness, self._number = witness, number
        self._gradients, self._repeat = gradients, repeat
        self._runs: dict[int, list[int]] = {}
        self._owned: Callable[[int], int | None] | None = None
        """Given a place in ``_holders``, returns which of its micro-batches another one repeats."""
        self._holders: Sequence[Sequence[str]] = ()
        """The workers of each rank for which the step was planned."""
        self._planned: int | None = None
        """The plan of a replica, as its workers compare it after a failure; None: there is none yet."""
        self._repeated: Container[int] = self._runs
        """Micro-batches that need no repetition; of a replica those that all of its workers have repeated."""
        self._read: Callable[[int], Any] | None = None
        """Reads a micro-batch of this rank's streams; None: ranks fetch any by its number."""
        self._handed: dict[int, bytes] = {}
        """Samples of streams for runs that are compared, encoded, by micro-batch."""
        self._repeats = False
        """Whether such a run of another rank's micro-batch is in progress."""
        self._error: UnicronError | None = None
        self._among: Sequence[str] = ()
        """The workers that know the verdict; those that have to end by it have ``_error``."""

    def plan(self, rank: int, ranks: int, share: Callable[[int], Sequence[int]]) -> None:
        """Plan a step without finished micro-batches; after a failure, a plan stays.

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

        self._owned, self._holders = owned, ()
        # A rank reads its micro-batches itself: another one, which has read them for an earlier plan, may be wrong.
        self._handed = {number: each for number, each in self._handed.items() if number == self.own}
        self.own, self._other = owned(rank), owned((rank + 1 + shift) % ranks)

    def plan_together(
        self,
        holders: Sequence[Sequence[str]],
        place: int,
        share: Callable[[int], Sequence[int]],
        reports: Sequence[Report | None],
    ) -> None:
        """Plan an attempt of a replica, whose workers all come to the same plan.

        A failure may have met them at different points of the step, and at the end of the one before. So nothing here
        follows from what this worker alone has done.

        Args:
            holders: the workers of each replica.
            place: of this worker's replica.
            share: returns the rows of a replica.
            reports: of this replica's workers, see `report`; None of one that has not begun the step.
        """
        planned = {None if each is None else each.get("planned") for each in reports}
        done = [set() if each is None else {*each.get("repeated", ())} for each in reports]
        self._repeated = set.intersection(*done) if done else set()
        if planned == {None}:
            self.plan(place, len(holders), share)
            self._holders, self._planned = holders, part_of(holders)
        elif len(planned) > 1 or self._owned is None:
            self.own, self._other, self._owned = None, None, None
            self._planned = 0  # of all: none of them repeats a row in this step
        else:
            self.enter(holders, place)

    def report(self) -> Report:
        """Return what this worker's partners have to know after a failure."""
        return {"planned": self._planned, "repeated": sorted(self._runs)}

    def enter(self, holders: Sequence[Sequence[str]], rank: int) -> None:
        """Begin an attempt of the plan; after a death each rank repeats that of the next present one.

        Args:
            holders: the workers of each rank.
            rank: of this worker.
        """
        if self._owned is None or not self._holders:
            self._holders = holders
        elif self._holders != holders and len(holders) > 1:
            following = holders[(rank + 1) % len(holders)]
            planned = holders[rank] in self._holders and following in self._holders
            self._other = self._owned(self._holders.index(following)) if planned else None

    def hand_samples_of(self, batch: GlobalBatch) -> None:
        """Take the place of a batch's streams for micro-batches that are repeated.

        All ranks get a copy for each run, of one memory layout and without the changes of an earlier run.
        """
        read, batch.fetch = batch.fetch, self._samples
        self._read = read

    def _samples(self, micro_batch: int) -> Any:
        assert self._read is not None
        handed = self._handed.get(micro_batch) if self._repeats or micro_batch == self.own else None
        # What is redistributed is read again: the rank that has handed it may be wrong.
        return self._read(micro_batch) if handed is None else codec.decode(handed)

    def hand_over(self, engine: Engine) -> None:
        """Send samples of streams to the ranks that repeat them; of all members, before they compute.

        Raises:
            ConfigError: they are no plain data.
        """
        if self._read is None or engine.world.size == 1:
            return
        engine.activity.enter("data")
        if self.own is not None and self.own not in self._handed:
            try:
                self._handed[self.own] = codec.encode(self._read(self.own))
            except codec.NotPlainData as error:
                raise ConfigError(f"witness_every={self._witness.every} with iterable data: {error}") from error
        own = b"" if self.own is None else self._handed[self.own]
        wanted = None if self._other in self._handed else self._other
        word = msgspec.msgpack.encode([self.own, len(own), wanted])
        parts = gather_bytes(engine.communicator, word, engine.tag("samples"))
        words = [msgspec.msgpack.decode(part, type=tuple[int | None, int, int | None]) for part in parts]
        givers = {number: (giver, size) for giver, (number, size, _) in enumerate(words) if number is not None}
        pairs = [(*givers[number], taker) for taker, (*_, number) in enumerate(words) if number in givers]
        rank = engine.world.rank
        arriving = torch.empty(sum(size for _, size, taker in pairs if taker == rank), dtype=torch.uint8)
        leaving = torch.frombuffer(bytearray(own or b"-"), dtype=torch.uint8)
        routes = []
        for giver, size, taker in pairs:
            memory = [leaving] if giver == rank else [arriving] if taker == rank else []
            routes.append(Route((giver, taker), size, memory=memory))
        engine.communicator.wait(engine.communicator.transfer(routes))
        if wanted is not None and len(arriving):
            self._handed[wanted] = arriving.numpy().tobytes()

    def observe(self, run: Callable[[int], None], micro_batch: int) -> None:
        """Run a micro-batch of this rank, and keep the digest of its gradients alone."""
        with self._gradients.apart(adds=True):
            run(micro_batch)
            self._record(micro_batch)

    def repeat(self, engine: Engine) -> None:
        """Run another rank's micro-batch, once."""
        is_there = self._read is None or self._other in self._handed
        if self._other is not None and self._other not in self._repeated and is_there:
            engine.check()
            self._run_again(engine, self._other)

    def compare(
        self,
        engine: Engine,
        ranks: Sequence[Sequence[int]],
        lockstep: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Compare the gradients before the commit.

        Args:
            engine: of this worker.
            ranks: those that hold a model together, by shard, for each replica; of whole models each alone.
            lockstep: inside, the workers of a replica run a micro-batch together.

        Raises:
            SilentCorruption: this rank is wrong.
            EpochChanged: another rank is, and has ended.
            GradientsDiffer: it is not known which ranks are wrong; raised on all.
            ConfigError: no rank has the same gradients twice; raised on all.
        """
        if self._error is not None and not {*self._among} <= {*engine.world.workers}:
            raise self._error  # another rank has ended by it already
        if len(ranks) == 1:
            return
        engine.activity.enter("commit")
        found = self._gather(engine, ranks)
        engine.fault("compared", engine.step)
        doubtful = in_doubt(found)
        if not doubtful:
            self._trust(engine, ranks, found)
            return
        logger.warning("gradients_differ step=%d micro_batches=%s", self._number, doubtful)
        self._hand_to_all(engine, doubtful)
        with lockstep():
            for micro_batch in doubtful * AGAIN if any(engine.world.rank in each for each in ranks) else ():
                engine.check()
                self._run_again(engine, micro_batch)
            engine.activity.enter("commit")
            found = self._gather(engine, ranks)
        self._decide(engine, ranks, {number: {r: each[number] for r, each in enumerate(found)} for number in doubtful})

    def _hand_to_all(self, engine: Engine, doubtful: Sequence[int]) -> None:
        if self._read is None:
            return
        known = {number: self._handed[number] for number in doubtful if number in self._handed}
        word = msgspec.msgpack.encode([self.own, known])
        parts = gather_bytes(engine.communicator, word, engine.tag("doubtful"))
        words = [msgspec.msgpack.decode(part, type=tuple[int | None, dict[int, bytes]]) for part in parts]
        for _, samples in words:
            self._handed.update(samples)
        # A wrong witness may have changed what it was handed, so the rank that has read a micro-batch is believed.
        self._handed.update({own: samples[own] for own, samples in words if own is not None and own in samples})

    def _run_again(self, engine: Engine, micro_batch: int) -> None:
        self._repeats = True
        try:
            with self._gradients.apart(adds=False):
                self._repeat(micro_batch)
                self._record(micro_batch)
        finally:
            self._repeats = False
        engine.activity.repeated()

    def _record(self, micro_batch: int) -> None:
        parts = parts_of(self._gradients.present())
        self._runs.setdefault(micro_batch, []).append(int(StateDigest(parts=parts).row[0]))

    def _gather(self, engine: Engine, ranks: Sequence[Sequence[int]]) -> list[dict[int, list[tuple[int, ...]]]]:
        own = msgspec.msgpack.encode(self._runs)
        parts = gather_bytes(engine.communicator, own, engine.tag("witness"))
        found = [msgspec.msgpack.decode(part, type=dict[int, list[int]]) for part in parts]
        return [together([found[rank] for rank in each]) for each in ranks]

    def _trust(self, engine: Engine, ranks: Sequence[Sequence[int]], found: Sequence[OwnRuns]) -> None:
        """Remember the workers that have been compared."""
        known = Counter(micro_batch for each in found for micro_batch in each)
        for holders, each in zip(ranks, found, strict=True):
            if any(known[micro_batch] > 1 for micro_batch in each):
                self._witness.right.update({engine.world.workers[rank]: self._number for rank in holders})

    def _decide(self, engine: Engine, ranks: Sequence[Sequence[int]], found: Mapping[int, Runs]) -> None:
        world, control = engine.world, engine.control
        verdicts = {number: judge(runs) for number, runs in found.items()}
        places = sorted({place for each in verdicts.values() for place in each.wrong})
        wrong = sorted(rank for place in places for rank in ranks[place])
        error: UnicronError | None = None
        if len(places) in {0, len(ranks)}:  # all: rather the data differ from run to run than all processors are broken
            error = self._undecided(engine, found, repeats=any(each.steady for each in verdicts.values()))
        else:
            nodes = [world.nodes[rank] for rank in wrong]
            logger.warning("corruption_found step=%d ranks=%s nodes=%s", self._number, wrong, nodes)
        for place in places if error is None else ():
            if world.rank in ranks[place]:
                first = next(number for number, each in verdicts.items() if place in each.wrong)
                error = self._corruption(engine, first, ranks[place], (len(places), len(ranks)))
        self._error, self._among = error, world.workers
        # Only once all know it may one end: another one that has to end would continue, with its wrong results.
        gather_bytes(engine.communicator, b"", engine.tag("verdict"))
        if error is not None:
            raise error
        assert control is not None
        with control.condition:
            control.condition.wait_for(lambda: control.failed_since(world.epoch))
        raise EpochChanged(f"ranks {wrong} have computed wrong gradients")

    def _corruption(
        self, engine: Engine, micro_batch: int, holders: Sequence[int], wrong: tuple[int, int]
    ) -> SilentCorruption:
        """Return the error of a worker.

        Args:
            engine: of the worker.
            micro_batch: that it has computed.
            holders: the ranks that have done so together, as it is not known which of them is wrong.
            wrong: number of ranks or replicas that are wrong, and of all.
        """
        world, number = engine.world, self._number
        worker, node, host, device = world.workers[world.rank], world.nodes[world.rank], socket.gethostname(), "cpu"
        placed = self._gradients.parameters[0].device
        if placed.type == "cuda":
            device = f"{placed} ({torch.cuda.get_device_name(placed)})"
        last = next((step for step in [self._witness.right.get(worker, number)] if step < number), None)
        since = number if last is None else number - last
        trusted = "never compared before" if last is None else f"last found right {since} steps before"
        who, whole = f"rank {world.rank} on node {node} (host {host}, device {device}), {trusted},", len(holders) == 1
        found = "" if whole else f"with the ranks {[*holders]} of its replica "
        found += f"a wrong gradient in step {number}, of {'micro-batch' if whole else 'row'} {micro_batch}"
        others = f"{wrong[1] - wrong[0]} of {wrong[1]} {'ranks' if whole else 'replicas'} have other bits"
        return SilentCorruption(
            # Tables of incidents cut long causes, so the suspect comes first.
            f"{who} has computed {found}: {others}. The step does without it, and its node gets no workers until: "
            f"unicron undrain {node}",
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
