"""The agent's pure parts: options, outbox, roster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from unicron_lightning import environ, wire
from unicron_lightning.agent import embedded, options
from unicron_lightning.agent.coordinator_session import RESEND_SECONDS, Outbox
from unicron_lightning.agent.workers.roster import Roster
from unicron_lightning.errors import AgentUnavailable, ConfigError
from unicron_lightning.link import retry_delay

WORKER = "n-1/0#1"
HELLO = wire.WorkerHello(worker=WORKER, local_rank=0, pid=1, capacity=4)


def parameters(endpoint: str = "", **conf: Any) -> RendezvousParameters:
    return RendezvousParameters("unicron", endpoint, "task", 1, 2, timeout=900, **conf)


def ready(epoch: int) -> wire.WorkerReady:
    return wire.WorkerReady(worker=WORKER, epoch=epoch, state={})


def epoch(number: int, *members: str) -> wire.Epoch:
    return wire.Epoch(
        number=number,
        kind="join",
        members=[wire.Member(worker=m, agent="n-1", node="n", host="h", local_rank=0) for m in members],
        store=wire.Address(host="h", port=1),
        hold=False,
        incident=None,
        published_at=0.0,
    )


def died(worker: str = WORKER) -> wire.WorkerDied:
    return wire.WorkerDied(worker=worker, cause="signal", code=9, at=0.0)


def event(name: str) -> wire.WorkerEvent:
    return wire.WorkerEvent(worker=WORKER, name=name, at=0.0, fields={})


def test_retries_spread_out() -> None:
    drawn = sorted(retry_delay(2.0) for _ in range(1000))
    assert 1.0 <= drawn[0] < 1.1 and 1.9 < drawn[-1] <= 2.0 and 1.4 < drawn[500] < 1.6


# ---- options


def test_defaults() -> None:
    chosen = options.from_parameters(parameters())
    assert (chosen.endpoint, chosen.host, chosen.embedded, chosen.worker_timeout) == (
        "127.0.0.1:29461",
        "127.0.0.1",
        True,
        None,
    )
    assert chosen.agent.startswith(f"{chosen.node}-")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("127.0.0.1", 29461)),
        ("host", ("host", 29461)),
        ("host:1", ("host", 1)),
        ("[::1]:7", ("::1", 7)),
        ("[::1]", ("::1", 29461)),
        (":9", ("127.0.0.1", 9)),
    ],
)
def test_endpoint(text: str, expected: tuple[str, int]) -> None:
    assert options.parse_endpoint(text) == expected


@pytest.mark.parametrize("text", ["host:0", "host:65536", "host:x", "::1", "[::1", "[::1]x", "host:-1"])
def test_wrong_endpoint_is_quoted(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^--endpoint {re.escape(repr(text))}: expected HOST"):
        options.parse_endpoint(text)


@pytest.mark.parametrize(
    "conf",
    [
        {"worker_timeout": "soon"},
        {"worker_timeout": "0"},
        {"worker_timeout": "inf"},
        {"embedded": "maybe"},
        {"allow_injection": "perhaps"},
        {"prepare": "now"},
        {"nods": "x"},
        {"token_file": "/nonexistent/token"},
    ],
)
def test_wrong_conf_is_quoted(conf: dict[str, str]) -> None:
    (key, value), *_ = conf.items()
    with pytest.raises(ConfigError, match=f"--rdzv-conf {key}={value}"):
        options.from_parameters(parameters(**conf))


@pytest.mark.parametrize(
    ("variable", "conf", "expected"),
    [(None, {}, True), ("0", {}, False), ("off", {"prepare": "true"}, True), ("true", {"prepare": "false"}, False)],
)
def test_prepared_workers_are_an_option(
    variable: str | None, conf: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNICRON_PREPARE")
    if variable is not None:
        monkeypatch.setenv("UNICRON_PREPARE", variable)
    assert options.from_parameters(parameters(**conf)).prepare is expected


def test_a_wrong_variable_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_PREPARE", "soon")
    with pytest.raises(ConfigError, match="UNICRON_PREPARE=soon: expected true or false"):
        options.from_parameters(parameters())


@pytest.mark.parametrize("value", [None, "true"])
def test_what_the_coordinator_it_starts_is_told(
    value: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(embedded.subprocess, "Popen", lambda command, **_: commands.append(command))
    conf = {} if value is None else {"allow_injection": value}
    embedded._spawn(options.from_parameters(parameters(**conf)), tmp_path / "log")
    (words,) = commands
    said = {name.rpartition(".")[2]: given for name, _, given in (word.partition("=") for word in words)}
    assert said["allow_injection"] == (value or "false")


def test_c10d_keys_are_tolerated() -> None:
    options.from_parameters(parameters(join_timeout="300", is_host="1"))


def test_remote_endpoint_wants_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        options.from_parameters(parameters("192.0.2.1"))
    secret = tmp_path / "token"
    secret.write_text("secret\n")
    chosen = options.from_parameters(parameters("192.0.2.1", token_file=str(secret)))
    assert (chosen.access.token.secret, chosen.embedded) == ("secret", False)


def test_links_to_other_machines_are_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_TOKEN", "secret")
    assert options.from_parameters(parameters("127.0.0.1")).url.startswith("http://")
    far = options.from_parameters(parameters("192.0.2.1"))
    assert (far.access.trust.encrypted, far.url) == (True, "https://192.0.2.1:29461/v1/agent")
    plain = options.from_parameters(parameters("192.0.2.1", plaintext="true"))
    assert (plain.access.trust.encrypted, plain.url) == (False, "http://192.0.2.1:29461/v1/agent")
    with pytest.raises(ConfigError, match=r"--rdzv-conf tls=no\.such: no such file; expected auto"):
        options.from_parameters(parameters("192.0.2.1", tls="no.such"))


def test_worker_environment() -> None:
    given = {
        environ.AGENT_SOCKET: "/s",
        environ.AGENT: "n-1",
        environ.AGENT_PID: "7",
        environ.ROUND: "3",
        environ.TASK: "t",
        environ.NODE: "n",
        environ.HOST: "h",
        environ.BASE_RANK: "4",
        "RANK": "5",
        "LOCAL_RANK": "0",
    }
    read = environ.read(given)
    assert (read.worker, read.local_rank, read.agent_pid) == ("n-1/1#3", 1, 7)
    with pytest.raises(AgentUnavailable, match="torchrun --rdzv-backend unicron"):
        environ.read({})


# ---- outbox


def drain(outbox: Outbox, now: float = 0.0) -> list[wire.Message]:
    taken = []
    while (message := outbox.take(now)) is not None:
        taken.append(message)
    return taken


def test_kept_in_order_while_away() -> None:
    outbox = Outbox()
    progress = wire.Progress(worker=WORKER, step=1, metrics={})
    said = [event("a"), died(), progress, HELLO, wire.Record(key="k", value="v"), event("b")]
    for message in said:
        outbox.put(message)
    outbox.opened()
    assert drain(outbox) == [said[0], said[1], said[4], said[5]]


def test_said_during_registration_is_not_lost() -> None:
    outbox = Outbox()
    outbox.opened()
    outbox.put(HELLO)
    assert drain(outbox) == [HELLO]


def test_repeats_what_may_be_lost() -> None:
    outbox = Outbox()
    outbox.opened()
    for message in (died("old"), event("a"), HELLO):
        outbox.put(message)
    drain(outbox, now=0.0)
    outbox.put(died("new"))
    drain(outbox, now=RESEND_SECONDS + 1.0)
    outbox.put(event("b"))
    outbox.closed(now=RESEND_SECONDS + 1.1)
    outbox.opened()
    assert drain(outbox) == [died("new"), event("b")]


def test_repeats_what_a_silent_coordinator_may_not_have_received() -> None:
    outbox = Outbox()
    outbox.opened()
    outbox.put(died("old"))
    drain(outbox, now=0.0)
    outbox.heard_at = RESEND_SECONDS + 1.0
    for seconds in (2.0, 5.0):
        outbox.put(died(f"{seconds}"))
        drain(outbox, now=RESEND_SECONDS + seconds)
    outbox.closed(now=2 * RESEND_SECONDS + 6.0)
    outbox.opened()
    assert drain(outbox) == [died("2.0"), died("5.0")]


# ---- roster


def roster(*said: wire.FromWorker) -> Roster:
    made = Roster()
    made.add(WORKER, 0)
    for message in said:
        made.heard(WORKER, message, now=0.0)
    return made


def test_registration_tells_the_last_ready() -> None:
    assert roster(HELLO, ready(0)).infos()[0].ready == ready(0)
    assert roster(HELLO, ready(0), ready(3)).infos()[0].ready == ready(3)


def test_registration_tells_who_is_in_which_replica() -> None:
    words = [wire.Replicas(worker=WORKER, epoch=number, replicas=[[WORKER]]) for number in (1, 2)]
    assert roster(HELLO, *words).infos()[0].replicas == words[1]


def test_newer_epoch_outdates_its_members_ready() -> None:
    waiting, member, expelled = roster(HELLO, ready(0)), roster(HELLO, ready(0)), roster(HELLO, ready(1))
    waiting.saw_epoch(epoch(2, "other"))
    member.saw_epoch(epoch(2, WORKER))
    expelled.saw_epoch(epoch(2, "other"))
    assert [r.infos()[0].ready for r in (waiting, member, expelled)] == [ready(0), None, None]
    assert waiting.epoch == 2


def test_a_report_for_an_epoch_that_is_over_is_not_told_again() -> None:
    known = roster(HELLO, ready(1))
    known.saw_epoch(epoch(2, WORKER))
    known.heard(WORKER, ready(1), now=0.0)
    assert known.infos()[0].ready is None


def test_silence_counts_after_the_hello_and_before_the_end() -> None:
    assert roster().silent(100.0, 10.0) == []
    assert roster(HELLO).silent(9.0, 10.0) == []
    assert roster(HELLO).silent(11.0, 10.0) == [WORKER]
    assert roster(HELLO, wire.WorkerDone(worker=WORKER)).silent(11.0, 10.0) == []
    ending = roster(HELLO)
    ending.leaves(WORKER)
    assert ending.silent(29.0, 2.0) == []
    assert ending.silent(31.0, 2.0) == [WORKER]
    excused = roster(HELLO)
    excused.excuse(5.0)
    assert excused.silent(11.0, 10.0) == []


def test_a_run_is_under_way_from_its_beginning_to_its_end() -> None:
    begins, ends = (wire.Training(worker=WORKER, active=active) for active in (True, False))
    assert [roster(*said).trains(WORKER) for said in ((HELLO,), (HELLO, begins), (HELLO, begins, ends))] == [
        False,
        True,
        False,
    ]
    known = roster(HELLO, begins)
    assert not known.has_left(WORKER), "its end may lie unread"
    known.leaves(WORKER)
    assert known.has_left(WORKER) and known.trains(WORKER)
    known.remove(WORKER)
    assert not known.trains(WORKER) and not known.has_left(WORKER)


def test_lookup_is_open_until_answered() -> None:
    lookup = wire.Lookup(worker=WORKER, key="k")
    asked = roster(HELLO, lookup)
    assert asked.unanswered() == [lookup]
    asked.saw_reply(wire.LookupReply(worker=WORKER, key="k", value=None))
    assert asked.unanswered() == []
    gone = roster(HELLO, lookup)
    gone.remove(WORKER)
    assert gone.unanswered() == []
