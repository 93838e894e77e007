"""`unicron report`: the course of a task from its log, and the file about it."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from coordinator.driver import World, running, settle
from coordinator.incidents.test_accounting import die, recover, tell

from unicron_lightning.cli.output import visible
from unicron_lightning.cli.report import TaskStory, losses_of, markdown, page, story_of, thinned
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.incidents import accounting
from unicron_lightning.coordinator.incidents.facts import IncidentClosed
from unicron_lightning.errors import ConfigError

HOSTILE = '<script>alert("1")</script>\x1b[2J'


class Recorded(World):
    """A world that keeps the times of its events."""

    def __init__(self, **limits: Any) -> None:
        self.times: list[float] = []
        super().__init__(**limits)

    def do(self, event: ev.Input) -> None:
        super().do(event)
        self.times += [self.now] * (len(self.events) - len(self.times))

    def log(self) -> list[dict[str, Any]]:
        pairs = enumerate(zip(self.times, self.events, strict=True))
        entries = [
            {"seq": seq, "at": at, "name": e.name, "task": e.task, "incident": e.incident, "fields": e.fields}
            for seq, (at, e) in pairs
        ]
        return [entry for entry in entries if entry["task"] == "t"]

    def story(self) -> TaskStory:
        closed = [entry for entry in self.log() if entry["name"] == IncidentClosed.event]
        bills = accounting.book(closed, self.machine.cluster, self.now)["incidents"]
        return story_of("t", self.log(), bills, self.now)


@pytest.fixture
def world() -> Recorded:
    """Three workers that start in 10 s, save a checkpoint at 100 s, and lose one worker at 130 s, for 20 s."""
    world = Recorded()
    a, b, c = running(world, 3)
    world.advance(10)
    tell(world, a, "started")
    world.advance(90)
    a.saved("/c", 5)
    world.advance(30)
    die(world, b, 0.25)
    recover(world, a, 0.5)
    world.advance(20)
    b.rendezvous().boot()
    settle(world)
    tell(world, c, "grown")
    world.advance(49.25)
    return world


def test_the_course_of_a_task(world):
    story = world.story()
    assert story.outcome is None
    assert story.start_up == pytest.approx(10, abs=0.6)
    assert [workers for _, workers in story.world] == [3, 2, 3]
    (saved,) = story.saved
    assert (saved.transition, saved.repeated) == (pytest.approx(0.5), pytest.approx(30))
    assert saved.seconds == pytest.approx(30 + (story.start_up or 0) - 0.5)
    assert story.lost == pytest.approx({"detection": 0.25, "transition": 0.5, "sub_healthy": 20 / 3}, abs=0.01)
    assert sum(story.kinds.values()) == pytest.approx(story.ended - story.began)
    assert 0.85 < story.goodput < 0.95


def test_only_the_newest_run_counts(world):
    log = world.log()
    again = [{**event, "seq": event["seq"] + 1000, "at": event["at"] + 1e5} for event in log]
    story = story_of("t", [*log, *again], [], world.now + 1e5)
    assert story.began == log[0]["at"] + 1e5
    with pytest.raises(ConfigError, match=r"'x'.*no event"):
        story_of("x", [], [], 0.0)


def test_the_page_is_self_contained_and_escaped(world):
    log = [{**event, "fields": {**event["fields"]}} for event in world.log()]
    closed = [entry for entry in log if entry["name"] == IncidentClosed.event]
    bills = accounting.book(closed, world.machine.cluster, world.now)["incidents"]
    bills = [{**bill, "cause": HOSTILE} for bill in bills]
    story = story_of("t", log, bills, world.now)
    text = page(story, [(step, 1 / (step + 1)) for step in range(3000)])
    assert "<script" not in text and "\x1b" not in text and "&lt;script&gt;" in text
    assert not re.search(r"(?:src|href)=|https?://|url\(|@import", text)
    assert "default-src 'none'" in text
    assert text.count("<svg") == 2 and text.count("<polyline") == 2
    ET.fromstring(re.sub(r"<meta[^>]*>", "", text.removeprefix("<!doctype html>\n")))  # well-formed
    assert len(text) < 60_000
    assert "<td>newest known step</td><td>2999</td>" in text, "the curve's, if it is newer"
    divided = re.findall(r"([\w., ]+) \{[^}]*overflow-wrap: anywhere", text)
    assert [each.strip() for each in divided] == ["td.long"], "no other cell is divided within a word"
    assert set(re.findall(r'<td class="long">([^<]*)', text)) == {html.escape(visible(HOSTILE))}
    plain = markdown(story, [(1, 0.5)])
    assert "<script" not in plain and "| incident |" in plain and "| 1 | 0.5 |" in plain


def test_a_task_without_a_step_or_an_incident():
    world = Recorded()
    world.nodes = (2, 2)
    world.agent("a").start()
    world.advance(5)
    story = world.story()
    assert (story.start_up, story.goodput, story.bills) == (None, 0.0, [])
    assert "Incidents" not in page(story, []) and "Loss" not in markdown(story, [])


def test_losses_of_a_loggers_file(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,step,loss\n0,1,2.5\n0,0,3\n,2,\n0,3,nan\n0,1,2.25\n")
    assert losses_of(path, "loss") == [(0, 3.0), (1, 2.25)]
    with pytest.raises(ConfigError, match=r"--loss train: .*'loss'.*expected step and train"):
        losses_of(path, "train")
    with pytest.raises(ConfigError, match="--metrics"):
        losses_of(tmp_path / "none.csv", "loss")
    assert thinned([(n, 0.0) for n in range(1000)], 3) == [(0, 0.0), (500, 0.0), (999, 0.0)]
