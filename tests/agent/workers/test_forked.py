"""A forked worker starts as an ordinary one does; what a fork would change is started in the ordinary way."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from unicron_lightning import environ
from unicron_lightning.agent.workers import forked
from unicron_lightning.agent.workers.forked import ForkedWorker, PreparedStarts
from unicron_lightning.local_cluster.processes import until

SCRIPT = Path(__file__).with_name("started.py")
SECONDS = 60.0
USUAL = SubprocessHandler._popen
SAME = {"PYTEST_CURRENT_TEST": ""}
OF_RANK_1 = {**SAME, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "t"}
SET_BY_IMPORTS = {"python/variables", "python/hooks"}
"""Only an ordinary start can print what was before the imports."""
OWN = {"libraries/own", "libraries/seed"}
"""Random in each process."""


class Ended(NamedTuple):
    """A worker's end."""

    code: int
    out: str
    err: str
    forked: bool


@contextmanager
def worker(folder: Path, *words: str, **variables: str) -> Iterator[SubprocessHandler]:
    """Start a worker as torchelastic does."""
    folder.mkdir(exist_ok=True)
    given = {**OF_RANK_1, environ.AGENT_PID: str(os.getpid()), **variables}
    handler = SubprocessHandler(
        sys.executable, ("-u", *words), given, str(folder / "out"), str(folder / "err"), 1, None
    )
    try:
        yield handler
    finally:
        if handler.proc.poll() is None:
            handler.close(signal.SIGKILL)
            handler.proc.wait(SECONDS)
        for output in (handler._stdout, handler._stderr):
            assert output is not None
            output.close()


def ended(folder: Path, *words: str, **variables: str) -> Ended:
    """Run a worker."""
    with worker(folder, *words, **variables) as handler:
        code = handler.proc.wait(SECONDS)
    return Ended(code, (folder / "out").read_text(), (folder / "err").read_text(), type(handler.proc) is ForkedWorker)


def waits(folder: Path) -> None:
    until("the worker's wait", lambda: (folder / "out").read_text() == "waits\n", SECONDS)


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or name.count("/") == 1:
        return {name: value}
    return {key: each for part in value for key, each in flat(value[part], f"{name}/{part}".lstrip("/")).items()}


@pytest.fixture(scope="module")
def starts() -> Iterator[PreparedStarts]:
    """Starts of the agent that this process is."""
    made = PreparedStarts({**os.environ, **SAME})
    made.start()
    yield made
    made.close()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[PreparedStarts]:
    """Starts of a test alone."""
    monkeypatch.setattr(SubprocessHandler, "_popen", USUAL)
    made = PreparedStarts({**os.environ, **SAME})
    yield made
    made.close()


@pytest.fixture
def ordinary(starts: PreparedStarts, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the starts after its call ordinary ones."""
    return lambda: monkeypatch.setattr(SubprocessHandler, "_popen", USUAL)


@pytest.mark.parametrize("kind", ["script", "module"])
def test_a_forked_start_equals_an_ordinary_one(
    kind: str, starts: PreparedStarts, ordinary: Callable[[], None], tmp_path: Path
) -> None:
    words = [str(SCRIPT)] if kind == "script" else ["-m", "tests.agent.workers.started"]
    forks = [ended(tmp_path / "worker", *words, "print") for _ in range(2)]
    ordinary()
    usual = ended(tmp_path / "worker", *words, "print")
    assert [each.forked for each in (*forks, usual)] == [True, True, False]
    assert [each.code for each in (*forks, usual)] == [0, 0, 0], (forks, usual)
    assert forks[0].err == usual.err
    one, two, expected = (flat(json.loads(each.out)) for each in (*forks, usual))
    assert one.keys() == expected.keys()
    for name in one.keys() - SET_BY_IMPORTS - OWN:
        assert one[name] == expected[name], name
    assert one["libraries/rank"] == [1, 1]
    for name in OWN:  # no number is shared
        assert len({str(numbers[name]) for numbers in (one, two, expected)}) == 3, name
    assert len({*one["libraries/own"].values(), *two["libraries/own"].values()}) == 6


@pytest.mark.parametrize("how", ["0", "3", "text", "error", "interrupt", "atexit", "kill"])
def test_a_forked_worker_ends_as_an_ordinary_one(
    how: str, starts: PreparedStarts, ordinary: Callable[[], None], tmp_path: Path
) -> None:
    one = ended(tmp_path / "worker", str(SCRIPT), how)
    ordinary()
    two = ended(tmp_path / "worker", str(SCRIPT), how)
    assert (one.forked, two.forked) == (True, False)
    assert one[:3] == two[:3]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_forked_worker_takes_signals(number: signal.Signals, starts: PreparedStarts, tmp_path: Path) -> None:
    with worker(tmp_path, str(SCRIPT), "wait") as handler:
        assert type(handler.proc) is ForkedWorker
        waits(tmp_path)
        with pytest.raises(subprocess.TimeoutExpired):
            handler.proc.wait(0.01)
        handler.close(number)
        assert handler.proc.wait(SECONDS) == -number
        assert handler.proc.poll() == -number


def changed_limit() -> Callable[[], object]:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if soft else hard, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def changed_umask() -> Callable[[], object]:
    before = os.umask(0o077)
    os.umask(before ^ 0o011)
    return lambda: os.umask(before)


@pytest.mark.parametrize(("change", "reason"), [
    (changed_limit, "the agent has changed its limits"),
    (changed_umask, "the agent has changed its Umask"),
])  # fmt: skip
def test_what_the_agent_has_changed_is_inherited(
    change: Callable[[], Callable[[], object]], reason: str, starts: PreparedStarts, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    if change is changed_limit and resource.getrlimit(resource.RLIMIT_CORE) == (0, 0):
        pytest.skip("this process may not change the limit")
    starts._reasons.clear()
    undo = change()
    try:
        ends = [ended(tmp_path, str(SCRIPT), "0") for _ in range(2)]
    finally:
        undo()
    assert [each[::3] for each in ends] == [(0, False)] * 2
    assert [record.getMessage() for record in caplog.records] == [f"ordinary_start reason={reason!r}"]
    assert ended(tmp_path, str(SCRIPT), "0").forked


@pytest.mark.parametrize("later", [False, True])
def test_a_forked_worker_ignores_the_signals_that_the_agent_ignores_then(
    later: bool, own: PreparedStarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an agent does whose shell has had it ignore some, which torchelastic handles later."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)}
    try:
        _ignore(before, ignored=not later)
        own.start()
        _ignore(before, ignored=later)
        one = ended(tmp_path / "worker", str(SCRIPT), "print")
        monkeypatch.setattr(SubprocessHandler, "_popen", USUAL)
        two = ended(tmp_path / "worker", str(SCRIPT), "print")
    finally:
        _ignore(before, ignored=False)
    assert (one.forked, two.forked) == (True, False), (one, two)
    found, expected = (json.loads(each.out)["system"] for each in (one, two))
    assert all(found[name] == expected[name] for name in ("SigIgn", "SigCgt", "handlers")), (found, expected)


def _ignore(usual: Mapping[signal.Signals, Any], *, ignored: bool) -> None:
    for number, handler in usual.items():
        signal.signal(number, signal.SIG_IGN if ignored else handler)


def test_other_variables_lead_to_an_ordinary_start(
    starts: PreparedStarts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts._reasons.clear()
    assert not ended(tmp_path, str(SCRIPT), "0", OMP_NUM_THREADS="7", CUDA_VISIBLE_DEVICES="1").forked
    assert "the prepared process' in CUDA_VISIBLE_DEVICES, OMP_NUM_THREADS" in caplog.text


def test_a_script_that_sets_variables_leads_to_an_ordinary_start(
    own: PreparedStarts, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prepared process ends as soon as this is known, or is not started."""
    reason = "ordinary_start reason='the script sets A, OMP_NUM_THREADS before it imports torch or Lightning'"
    names: list[str] = []
    monkeypatch.setattr(own, "_set_by_script", lambda: names)
    own.start()
    assert ended(tmp_path, str(SCRIPT), "0").forked
    names += ["OMP_NUM_THREADS", "A"]
    for _ in range(2):
        assert ended(tmp_path, str(SCRIPT), "3")[::3] == (3, False)
    assert own.pid is None
    own.close()
    other = PreparedStarts({**os.environ, **SAME}, lambda: names)
    other.start()
    assert other.pid is None
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [reason] * 2


def test_workers_without_lightning_are_forked_by_a_process_without_it(own: PreparedStarts, tmp_path: Path) -> None:
    own.close()
    loops = PreparedStarts({**os.environ, **SAME}, lightning=False)
    loops.start()
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nwanted = ('torch._dynamo', 'unicron_lightning.loop.run', 'lightning', 'torchmetrics')\n"
        "print(*[name in sys.modules for name in wanted])"
    )
    try:
        end = ended(tmp_path / "worker", str(script))
    finally:
        loops.close()
    assert (end.out, end.forked) == ("True True False False\n", True)


def test_a_forked_worker_does_not_note_what_its_script_sets(starts: PreparedStarts, tmp_path: Path) -> None:
    """Its variables are set after the imports; those that imports have set are none of the script's."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nos.environ['NEW'] = '1'\nimport lightning.pytorch\n"
        "from unicron_lightning.prepared import set_by_script\nprint(set_by_script.noted())"
    )
    end = ended(tmp_path / "worker", str(script))
    assert (end.out, end.forked) == ("None\n", True)


def test_other_programs_are_started_in_the_ordinary_way(
    starts: PreparedStarts, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts._reasons.clear()
    program = tmp_path / "program"
    program.write_text("raise SystemExit(4)")
    assert ended(tmp_path / "1", str(program))[::3] == (4, False)
    handler = SubprocessHandler("/bin/sh", ("-c", "exit 5"), {}, None, None, 0, None)
    assert handler.proc.wait(SECONDS) == 5
    (tmp_path / "torch.py").write_text("raise SystemExit(6)")
    script = tmp_path / "script.py"
    script.write_text("import torch")
    assert ended(tmp_path / "1", str(script))[::3] == (6, False)
    monkeypatch.chdir(tmp_path)
    assert ended(tmp_path / "1", "-m", "script")[::3] == (6, False)
    reasons = [record.args[0] for record in caplog.records if record.args]  # type: ignore[index,union-attr]
    assert reasons[0] == f"{str(program)!r} is neither a file *.py nor -m MODULE"
    assert reasons[1] == f"the command does not begin with {sys.executable} -u"
    assert reasons[2] == f"{tmp_path / 'torch.py'} has the name of a module that is imported before the script runs"
    assert reasons[3] == "the agent has changed its working directory"


def test_installed_packages_lead_to_an_ordinary_start(
    starts: PreparedStarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert ended(tmp_path, str(SCRIPT), "0").forked
    assert starts._installed
    monkeypatch.setattr(starts, "_installed", dict.fromkeys(starts._installed, 1))
    assert not ended(tmp_path, str(SCRIPT), "0").forked
    assert "packages were installed in" in caplog.text


def test_a_request_that_is_too_long_is_an_ordinary_start(
    starts: PreparedStarts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts._reasons.clear()
    assert ended(tmp_path, str(SCRIPT), "0", "x" * 50_000)[::3] == (0, False)
    assert "too long for a prepared process" in caplog.text
    assert ended(tmp_path, str(SCRIPT), "0").forked


def test_another_version_of_torch(
    own: PreparedStarts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SubprocessHandler, "_popen", lambda self, command: None)
    own.start()
    assert own.pid is None
    assert "this version of torch starts workers in another way" in caplog.text


def test_a_worker_outlives_the_prepared_process(
    own: PreparedStarts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own.start()
    with worker(tmp_path, str(SCRIPT), "wait") as handler:
        waits(tmp_path)
        assert own.pid is not None
        os.kill(own.pid, signal.SIGKILL)
        assert ended(tmp_path / "2", str(SCRIPT), "3")[::3] == (3, False)
        assert ended(tmp_path / "2", str(SCRIPT), "3")[::3] == (3, False)
        assert own.pid is None
        assert handler.proc.poll() is None
        handler.close(signal.SIGTERM)
        assert handler.proc.wait(SECONDS) == -signal.SIGTERM
    assert caplog.text.count("the prepared process has died") == 1


def test_a_prepared_process_that_does_not_answer(
    own: PreparedStarts, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "PREPARE_SECONDS", 0.1)
    own.start()
    assert own.pid is not None
    os.kill(own.pid, signal.SIGSTOP)
    assert ended(tmp_path, str(SCRIPT), "3")[::3] == (3, False)
    assert own.pid is None
    assert "the prepared process is not ready after 0.1 s" in caplog.text


def test_nothing_outlives_a_killed_agent(tmp_path: Path) -> None:
    program = Path(__file__).with_name("forking_agent.py")
    command = [sys.executable, program, SCRIPT, "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        lines = [agent.stdout.readline() for _ in range(2)]
        (pids,) = [line for line in lines if line != "waits\n"]
        files = [os.pidfd_open(int(pid)) for pid in pids.split()]
        assert len(files) == 2
        agent.kill()
        for file in files:
            assert select.select([file], [], [], SECONDS)[0] == [file]
            os.close(file)
