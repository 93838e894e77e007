"""States of streams: a stream that is opened again begins at the last state that all ranks have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from data import devices
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from unicron_lightning.data.order import StepShape, check_loader
from unicron_lightning.data.sources import same
from unicron_lightning.data.streams import STATE_STEPS, StreamEnds, StreamOpener, Streams

SHAPE = StepShape(devices=2, accumulation=2)
DUE = STATE_STEPS * SHAPE.accumulation
read: list[int] = []


class Counter(IterableDataset[Any]):
    """Device d has the numbers d, d + 2, ..., perhaps each with a random number; its state is the next number."""

    def __init__(self, draws: bool = True) -> None:
        self.at = 0
        self.draws = draws

    def __iter__(self) -> Iterator[Any]:
        self.own = devices.rank
        while True:
            read.append(self.at)
            self.at += 1
            yield self.own + 2 * (self.at - 1), float(torch.rand(())) if self.draws else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Forgetful(Counter):
    """Begins with the first number, whatever state it is given."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = 0


class Opaque(Counter):
    """Its state cannot be sent."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self}


def streams_of(dataset: Any, ends: StreamEnds, **options: Any) -> Streams:
    loader: Any = StatefulDataLoader(dataset, batch_size=1, **options)
    return Streams(StreamOpener(loader, SHAPE.devices, 1, devices.seen_as), SHAPE, ends)


def begun() -> StreamEnds:
    ends = StreamEnds()
    ends.begin(0, {})
    return ends


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_opened_at_the_last_state_that_all_ranks_have(workers: int) -> None:
    ends, other = begun(), begun()
    streams = streams_of(Counter(draws=not workers), ends, num_workers=workers)
    assert streams.check()[0].tolist() == [0]
    streams.look(0, STATE_STEPS, [0, 1])  # up to two batches after the state
    news = ends.news()
    assert news is not None and {stream: state[0] for stream, state in news["states"].items()} == {0: DUE, 1: DUE}
    expected = [streams.get(0, 1, number) for number in (DUE, DUE + 1)]
    streams.close()

    other.agree([news, {"ends": {}, "states": {1: (DUE - 1, b"older", "")}}])
    joined = begun()
    joined.load_state(other.state())
    read.clear()
    again = streams_of(Counter(draws=not workers), joined, num_workers=workers)
    again.begin_step(0, STATE_STEPS)
    assert all(same(again.get(0, 1, DUE + at), batch) for at, batch in enumerate(expected))
    assert workers or min(read) == DUE, "nothing is skipped"
    again.begin_step(0, 1)
    assert same(again.get(0, 1, 3), streams_of(Counter(draws=not workers), begun()).get(0, 1, 3)), "an earlier batch"
    again.close()


def test_a_state_after_which_another_batch_follows_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    ends = begun()
    streams = streams_of(Counter(), ends)
    streams.look(0, STATE_STEPS, [0])
    news = ends.news()
    assert news is not None
    number, data, _ = news["states"][0]
    other = begun()
    other.agree([{"ends": {}, "states": {0: (number, data, "of another batch")}}])
    again = streams_of(Counter(), other)
    again.begin_step(0, STATE_STEPS)
    assert same(again.get(0, 0, DUE), streams.get(0, 0, DUE))
    assert f"before batch {DUE} of stream 0" in caplog.text


def test_states_belong_to_an_epoch() -> None:
    ends = begun()
    ends.agree([{"ends": {}, "states": {0: (DUE, b"state", "digest")}}])
    ends.begin(0, {})
    assert ends.states and ends.state()["states"] == {0: (DUE, b"state", "digest")}
    ends.begin(1, {})
    assert not ends.states
    ends.load_state({"epoch": 1, "known": {}})
    assert not ends.states, "a checkpoint of an earlier version"


@pytest.mark.parametrize(
    ("dataset", "workers", "reason"),
    [
        pytest.param(Forgetful(), 0, "another batch follows after load_state_dict", id="forgetful"),
        pytest.param(Opaque(), 0, "value['loader']", id="opaque"),
        pytest.param(Counter(), 1, "another batch follows after load_state_dict", id="random_state_of_a_worker"),
    ],
)
def test_states_that_do_not_hold_are_not_used(
    dataset: Any, workers: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    ends = begun()
    streams = streams_of(dataset, ends, num_workers=workers)
    streams.check()
    assert "stream_states_unused" in caplog.text and reason in caplog.text
    streams.look(0, STATE_STEPS, [0])
    assert ends.news() is None
    streams.begin_step(0, STATE_STEPS)
    assert [int(streams.get(0, 0, number)[0]) for number in (DUE, DUE + 1)] == [DUE * 2, DUE * 2 + 2]
    streams.close()


def test_a_stateful_loader_is_supported_and_another_iter_is_not() -> None:
    check_loader(StatefulDataLoader(Counter()))
    check_loader(StatefulDataLoader(range(4)))
