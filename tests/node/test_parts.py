"""The daemon's parts without processes: slots, due steps, logs, command lines, job files."""

from __future__ import annotations

import asyncio
import datetime
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unicron_lightning.cli.calibrate import written
from unicron_lightning.cli.certs import write_certificates
from unicron_lightning.cli.inspection import Speeds
from unicron_lightning.cli.job_file import array_of, read_job
from unicron_lightning.cli.node import Tail
from unicron_lightning.cli.plan.situation import PerformanceConfig
from unicron_lightning.errors import ConfigError
from unicron_lightning.jobs import Job, problem
from unicron_lightning.link import end_tasks
from unicron_lightning.node.daemon import Daemon
from unicron_lightning.node.options import (
    NodeOptions,
    Slot,
    known_logs,
    make_options,
    remember_logs,
    slots_of,
    visible_devices,
)
from unicron_lightning.node.process import (
    CANT_START,
    LogPipe,
    RotatingFile,
    activated,
    hand_token,
    torchrun_command,
    torchrun_environment,
)
from unicron_lightning.node.reconcile import GIVEN_UP_SECONDS, KILLED_SECONDS, AgentKey, AgentState, DueSteps, steps
from unicron_lightning.planner.performance.model import points_from_csv
from unicron_lightning.tls import AccessOptions
from unicron_lightning.wire.daemon import Launch, NodeRun

EIGHT = [str(number) for number in range(8)]


@pytest.mark.parametrize(
    ("text", "devices", "expected"),
    [
        (None, [], [("0", None)]),
        (None, ["0", "1"], [("0", "0"), ("1", "1")]),
        ("3", [], [("0", None), ("1", None), ("2", None)]),
        ("1", EIGHT, [("0", "0,1,2,3,4,5,6,7")]),
        ("4", EIGHT, [("0", "0,1"), ("1", "2,3"), ("2", "4,5"), ("3", "6,7")]),
        ("0-3,4-7", EIGHT, [("0-3", "0,1,2,3"), ("4-7", "4,5,6,7")]),
        ("0,2", ["GPU-a", "GPU-b", "GPU-c"], [("0", "GPU-a"), ("2", "GPU-c")]),
        ("left,right", EIGHT, [("left", None), ("right", None)]),
        ("0,1", [], [("0", None), ("1", None)]),
    ],
)
def test_accelerators_are_divided(text: str | None, devices: list[str], expected: list[tuple[str, str | None]]) -> None:
    assert [(slot.label, slot.devices) for slot in slots_of(text, devices)] == expected


@pytest.mark.parametrize("text", ["0", "3", "a,a", "a,", "a/b,c", "..,a", "7-9,1", "3-1,0"])
def test_slots_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slots"):
        slots_of(text, EIGHT)


def test_accelerators_are_found(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_devices({}, tmp_path) == ["2", "10"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "5, GPU-x"}, tmp_path) == ["5", "GPU-x"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def launch(name: str = "j", slot: str = "0", *, ending: bool = False, **fields: Any) -> Launch:
    job = Job(name=name, command=["train.py", "--x"], submitted_at=5.0, **fields)
    return Launch(job=job, slot=slot, ending=ending)


KEY = AgentKey("j", 5.0, "0")


@pytest.mark.parametrize(
    ("wanted", "state", "expected"),
    [
        (launch(), None, DueSteps(start=(launch(),))),
        (launch(), AgentState(running=True), DueSteps()),
        (launch(), AgentState(running=False, code=0, ended_at=100.0), DueSteps()),
        (launch(), AgentState(running=False, code=1, ended_at=90.0), DueSteps(wake_at=90.0 + GIVEN_UP_SECONDS)),
        (launch(), AgentState(running=False, code=1, ended_at=100.0 - GIVEN_UP_SECONDS), DueSteps(start=(launch(),))),
        (launch(), AgentState(running=False, code=-9, ended_at=100.0), DueSteps(wake_at=100.0 + KILLED_SECONDS)),
        (launch(), AgentState(running=True, stopping=True), DueSteps()),
        (launch(), AgentState(running=False, stopping=True, code=0, ended_at=100.0), DueSteps(start=(launch(),))),
        (launch(ending=True), None, DueSteps()),
        (launch(ending=True), AgentState(running=False, code=-9), DueSteps()),
        (None, AgentState(running=True), DueSteps(stop=(KEY,))),
        (None, AgentState(running=True, stopping=True), DueSteps()),
        (None, AgentState(running=False, code=0), DueSteps(forget=(KEY,))),
    ],
)
def test_what_is_to_be_done(wanted: Launch | None, state: AgentState | None, expected: DueSteps) -> None:
    known = {} if state is None else {KEY: state}
    assert steps([wanted] if wanted else [], known, 100.0) == expected


def test_a_job_of_the_same_name_is_another_one() -> None:
    other = Launch(job=Job(name="j", command=["train.py"], submitted_at=6.0), slot="0")
    assert steps([other], {KEY: AgentState(running=True)}, 0.0) == DueSteps(start=(other,), stop=(KEY,))


def test_a_full_file_is_turned_over(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "a" / "x.log", size=10, number=2)
    for text in (b"11111", b"11111", b"2222222", b"33333", b"4" * 20, b"5"):
        file.write(text)
    file.close()
    found = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert found == {"x.log": b"5", "x.log.1": b"4" * 20, "x.log.2": b"33333"}
    again = RotatingFile(tmp_path / "a" / "x.log", size=10, number=2)
    again.write(b"6")
    again.close()
    assert (tmp_path / "a" / "x.log").read_bytes() == b"56", "it is appended to"
    none = RotatingFile(tmp_path / "b.log", size=3, number=0)
    none.write(b"111")
    none.write(b"2")
    none.close()
    assert [path.name for path in tmp_path.glob("b*")] == ["b.log"]
    assert (tmp_path / "b.log").read_bytes() == b"2"


def test_a_log_is_read_over_its_turning(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("".join(f"line {number}\n" for number in range(100)))
    tail = Tail(path, size=20)
    assert tail.read() == "line 98\nline 99\n"
    with path.open("a") as file:
        file.write("old")
    path.replace(tmp_path / "x.log.1")
    assert tail.read() == "old", "for a moment there is none"
    path.write_text("new")
    assert tail.read() == "new"
    assert tail.read() == ""
    path.unlink()
    os.mkfifo(path)
    assert tail.read() == "", "a pipe in its place is not opened"
    tail.close()
    with pytest.raises(OSError, match="no regular file"):
        Tail(path)


def test_speeds_are_of_the_last_half_minute() -> None:
    speeds = Speeds()

    def saw(now: float, step: int) -> None:
        speeds.update({"tasks": {"t": {"progress": {"step": step}}}}, now)

    saw(0.0, 100)
    assert speeds.of("t") is None
    for second in range(1, 100):
        saw(float(second), 100 + second * (2 if second < 50 else 3))
    assert speeds.of("t") == pytest.approx(3.0)
    saw(100.0, 7)
    assert speeds.of("t") is None, "a new life began at an earlier step"
    assert speeds.of("x") is None


async def test_a_pipe_takes_what_several_write(tmp_path: Path) -> None:
    pipe = LogPipe(tmp_path / "pipe", RotatingFile(tmp_path / "x.log", size=1 << 20, number=1))
    pipe.note("begins")
    for text in ("first\n", "second\n" * 1000):
        with (tmp_path / "pipe").open("w") as writer:
            writer.write(text)
        await asyncio.sleep(0)
    pipe.close()
    assert (tmp_path / "x.log").read_text() == "---- begins\nfirst\n" + "second\n" * 1000
    assert not (tmp_path / "pipe").exists()


def options(**changes: Any) -> NodeOptions:
    given: dict[str, Any] = {"endpoint": "h:1", "node": "n", "slots": "1", "logs": None, "log_megabytes": 1.0,
                             "log_files": 1, "local_addr": None, "stop_seconds": 5.0, "leave_on": None,
                             "notice_file": None, "rack": None, "kind": None}  # fmt: skip
    access = {name: changes.pop(name) for name in [*changes] if name in AccessOptions.__dataclass_fields__}
    return make_options(access=AccessOptions(**access), **{**given, **changes})


def test_how_torchrun_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNICRON_TOKEN", "secret")
    made = options()
    made = NodeOptions(**{**vars(made), "slots": (Slot(label="0", devices="3"),)})
    one = launch(environment={"A": "b"}, min_nodes=2, max_nodes=4, workers_per_node=8, max_restarts=3, weight=2.5)
    words = " ".join(torchrun_command(one, made, tmp_path)[1:])
    assert words == (
        "-m unicron_lightning.node.launch --rdzv-backend unicron --rdzv-endpoint h:1 --rdzv-id j "
        "--rdzv-conf node=n,slot=0,weight=2.5,embedded=false,connect_timeout=900,"
        f"token_file={tmp_path}/token "
        "--nnodes 2:4 --nproc-per-node 8 --max-restarts 3 train.py --x"
    )
    inherited = {"HOME": "/h", "UNICRON_AGENT": "of another", "UNICRON_TOKEN": "secret"}
    environment = torchrun_environment(one, made, tmp_path, inherited)
    assert environment.items() >= {"HOME": "/h", "A": "b", "CUDA_VISIBLE_DEVICES": "3"}.items()
    assert not {"UNICRON_AGENT", "UNICRON_TOKEN"} & environment.keys()
    assert environment["UNICRON_DAEMON_PID"] == str(os.getpid())
    hand_token(made, tmp_path)
    file = tmp_path / "token"
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("secret", 0o600)
    made = options(token_file=str(file))
    assert f"token_file={file}" in " ".join(torchrun_command(one, made, tmp_path / "other"))


def test_torchrun_trusts_what_the_daemon_trusts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNICRON_TOKEN", "secret")
    write_certificates(tmp_path / "tls", [], ["me"], datetime.timedelta(days=1))
    monkeypatch.chdir(tmp_path)
    one = launch()
    for given, words in (
        ({}, set()),
        ({"plaintext": True, "forwarded": True}, {"plaintext=true", "forwarded=true"}),
        ({"tls": "auto"}, {"tls=auto"}),
        ({"tls": "sha256:" + "AB" * 32}, {"tls=sha256:" + "AB" * 32}),
        (
            {"tls": "tls/ca.pem", "tls_client": "tls/client-me.pem"},
            {f"tls={tmp_path}/tls/ca.pem", f"tls_client={tmp_path}/tls/client-me.pem"},
        ),
    ):
        made = options(**given)
        command = torchrun_command(one, made, tmp_path)
        conf = set(command[command.index("--rdzv-conf") + 1].split(","))
        assert {each for each in conf if each.startswith(("tls", "plaintext", "forwarded"))} == words
        assert made.access.trust.encrypted == ("plaintext" not in given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"endpoint": "h:x"}, "expected HOST"),
        ({"node": "a/b"}, "--node a/b: expected letters"),
        ({"node": "a,b"}, "--node a,b: expected letters"),
        ({"log_megabytes": 0.0}, "--log-size 0.0"),
        ({"stop_seconds": 0.0}, "--stop-seconds 0.0"),
        ({"tls": "sha256:12"}, "--tls sha256:12: expected auto"),
        ({"token_file": "/no/such"}, "--token-file /no/such"),
    ],
)
def test_wrong_options_are_refused(changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_TOKEN", "secret")
    with pytest.raises(ConfigError, match=words):
        options(**changes)


def test_a_coordinator_elsewhere_needs_a_token_that_is_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=f"copy the coordinator's token file to {tmp_path}/unicron/token"):
        options()
    assert options(endpoint="127.0.0.1:1").access.token.origin == f"{tmp_path}/unicron/token", "here it is made"


def test_a_job_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "gpt.yaml"
    file.write_text("command: [train.py, 10, 0.5]\nfolder: src\nprofile: {1: 1e15}\nmax_nodes: 4\n"
                    "python: venv/\nsecrets: {KEY: 'file:key', OTHER: 'env:OTHER'}\n")  # fmt: skip
    expected = Job(
        name="gpt",
        command=["train.py", "10", "0.5"],
        folder=str(tmp_path / "src"),
        profile={1: 1e15},
        weight=2.0,
        environment={"SEED": "7"},
        max_nodes=4,
        python=str(tmp_path / "venv"),
        secrets={"KEY": f"file:{tmp_path}/key", "OTHER": "env:OTHER"},
    )
    assert read_job(file, ["weight=2", "environment.SEED=7"]) == expected
    example = resources.files("unicron_lightning.conf").joinpath("examples/job.yaml")
    with resources.as_file(example) as path:
        assert read_job(path, []).name == "gpt"
    file.write_text("command: [x]\n")
    assert read_job(file, []).folder == str(Path.cwd()), "the submitter's"
    assert read_job(file, ["folder=null"]).folder is None, "the daemon's"


def test_the_folders_of_logs_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    default = tmp_path / f"unicron-{os.getuid()}" / "logs"
    assert known_logs() == [default]
    for folder in ("/a/b", "/c", "/a/b"):
        remember_logs(Path(folder))
    assert known_logs() == [default, Path("/a/b"), Path("/c")]
    (tmp_path / f"unicron-{os.getuid()}" / "log-folders").write_bytes(b"\xff")
    assert known_logs() == [default]


def test_an_array_is_a_job_for_each_index() -> None:
    job = Job(name="j", command=["x.py", "--seed={index}", "{}"], environment={"OUT": "out/{index}"})
    jobs = array_of(job, "0-2,7")
    assert [each.name for each in jobs] == ["j-0", "j-1", "j-2", "j-7"]
    assert jobs[3].command == ["x.py", "--seed=7", "{}"]
    assert jobs[3].environment == {"UNICRON_ARRAY_INDEX": "7", "OUT": "out/7"}
    for wrong in ("", "a", "3-1", "1,1", "0-1000", "0-999,1000", "-1", "1-", "9999999999"):
        with pytest.raises(ConfigError, match=f"--array {wrong}: expected up to 1000"):
            array_of(job, wrong)


def test_a_virtual_environment_and_secrets_are_those_of_the_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UNICRON_TOKEN", "secret")
    made = options()
    made = NodeOptions(**{**vars(made), "slots": (Slot(label="0"),)})
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "key").write_text("from a file\n")
    inherited = {"PATH": "/usr/bin", "B": "from the daemon", "UNICRON_TOKEN": "secret"}
    secrets = {"A": f"file:{tmp_path}/key", "C": "env:B"}
    one = launch(python=str(tmp_path / "venv"), secrets=secrets)
    assert torchrun_command(one, made, tmp_path)[0] == f"{tmp_path}/venv/bin/python"
    environment = torchrun_environment(one, made, tmp_path, inherited)
    assert environment["VIRTUAL_ENV"] == f"{tmp_path}/venv"
    assert environment["PATH"] == f"{tmp_path}/venv/bin:/usr/bin"
    assert (environment["A"], environment["C"]) == ("from a file", "from the daemon")
    assert torchrun_command(launch(python=sys.executable), made, tmp_path)[0] == sys.executable
    assert torchrun_command(launch(python="python3"), made, tmp_path)[0] == "python3", "found in PATH"
    with pytest.raises(ValueError, match=f"python={tmp_path}/no: expected an interpreter or a virtual environment"):
        torchrun_command(launch(python=f"{tmp_path}/no"), made, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("x" * 200_000)
    for source in ("env:NO", *(f"file:{tmp_path}/{name}" for name in ("no", "pipe", "large", "venv"))):
        with pytest.raises(ValueError, match=f"secrets.A={source}: expected"):
            torchrun_environment(launch(secrets={"A": source}), made, tmp_path, inherited)


def test_no_secret_of_a_job_is_the_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNICRON_TOKEN", "a-long-token")
    made = NodeOptions(**{**vars(options()), "slots": (Slot(label="0"),)})
    (tmp_path / "token").write_text("a-long-token\n")
    (tmp_path / "settings").write_text("export UNICRON_TOKEN=a-long-token\n")
    inherited = {"COPY": "a-long-token"}
    for source in (f"file:{tmp_path}/token", f"file:{tmp_path}/settings", "env:COPY"):
        with pytest.raises(ValueError, match=f"secrets.A={source}: it holds the token, which no job gets") as refused:
            torchrun_environment(launch(secrets={"A": source}), made, tmp_path, inherited)
        assert "a-long-token" not in str(refused.value)


def test_activation_commands_run_before_torchrun_in_its_process(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("export FROM_FILE=$1x\n")
    job = launch(activate=[f"source {tmp_path}/env.sh", "export A='b c'; B=d"]).job
    program = ["bash", "-c", "echo $FROM_FILE,$A,$B,$0,$$", "it's"]
    assert activated(launch().job, program, tmp_path) == program
    with subprocess.Popen(activated(job, program, tmp_path), stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0] == f"x,b c,,it's,{process.pid}\n"
    failing = launch(activate=["true", "(exit 3)", "touch no"]).job
    (tmp_path / "second").mkdir()
    command = activated(failing, program, tmp_path / "second")
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (ended.returncode, ended.stderr) == (3, "unicron: activate: (exit 3): ended with status 3\n")
    assert not (tmp_path / "no").exists()


SHAPE = """\
transformer: {num_layers: 2, hidden_size: 8, num_heads: 2, sequence_length: 8, vocabulary_size: 64,
              global_batch_size: 4}
"""


def test_a_profile_may_be_a_table_of_a_calibration(tmp_path: Path) -> None:
    rows = [{"workers": n, "step_seconds": 2.0 / n, "relative_error": 0.01} for n in (2, 4)]
    file, table = tmp_path / "j.yaml", tmp_path / "j.csv"
    file.write_text("command: [x]\nprofile: j.csv\nworkers_per_node: 2\nflops_per_step: 1.0e+9\n")
    for flops in (None, 1e9):
        table.write_text(written(rows, flops))
        assert read_job(file, []).profile == {1: 1e9, 2: 2e9}
        assert points_from_csv(table.read_text(), flops_per_step=1e9)[1].relative_error == 0.01
    for override, words in (
        ("workers_per_node=3", "workers=2: expected multiples of workers_per_node=3"),
        ("profile=no.csv", "profile=.*no.csv: .*No such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_job(file, [override])
    table.write_text(written(rows, None))
    with pytest.raises(ConfigError, match=r"profile=.*j\.csv: table row 1: .*flops_per_step"):
        read_job(file, ["flops_per_step=null"])


def test_layouts_are_given_or_left_to_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "j.yaml"
    file.write_text("command: [x]\n")
    for override, layouts, auto in (("layouts=auto", {}, True), ("layouts={2: [1, 2]}", {2: [1, 2]}, False)):
        job = read_job(file, [override])
        assert (job.layouts, job.auto_layouts) == (layouts, auto)
    both = msgspec.structs.replace(job, auto_layouts=True)
    assert problem(both) == "layouts={2: [1, 2]} with auto_layouts=true: expected only one of them"


def test_a_job_file_has_the_transformer_of_a_plan_file(tmp_path: Path) -> None:
    file = tmp_path / "j.yaml"
    file.write_text(f"command: [x]\n{SHAPE}")
    shape = read_job(file, ["transformer.accelerator=H100"]).transformer
    assert shape == PerformanceConfig(transformer=shape).transformer
    assert shape is not None and (shape.accelerator, shape.num_layers, shape.may_idle) == ("H100", 2, True)
    sent = msgspec.json.encode(read_job(file, ["transformer.accelerator=H100"]))
    assert msgspec.json.decode(sent, type=Job).transformer == shape


@pytest.mark.parametrize(
    ("text", "override", "words"),
    [
        ("command: [x]\nmax_node: 4\n", "weight=1", "max_node=4: unknown key, expected one of weight, min_nodes"),
        ("name: j\n", "weight=1", "command=[]: expected the script and its arguments"),
        ("command: [x]\n", "weight=much", "weight='much': expected a number"),
        ("command: [x]\n", "weight=-1", "weight=-1.0: expected a number > 0"),
        ("command: [x]\n", "weight", "--set weight: expected key=value"),
        ("- x\n", "weight=1", "expected a mapping"),
        ("command: [x]\ntransformer: {num_layers: 0}\n", "weight=1", "transformer.hidden_size is missing: expected"),
        (
            "command: [x]\ntransformer: {num_layers: two}\n",
            "weight=1",
            "transformer.num_layers='two': expected a",
        ),
        (f"command: [x]\n{SHAPE}", "transformer.num_heads=3", "transformer: num_heads=3: expected a divisor of hidden"),
        (f"command: [x]\n{SHAPE}", "transformer.accelerator=B3", "transformer: accelerator='B3': expected one of A100"),
        ("command: [x]\nlayouts: best\n", "weight=1", "layouts='best': expected auto, or [TP, PP] or [shards]"),
        (f"command: [x]\n{SHAPE}", "weight=1", "transformer.accelerator is missing: expected one of A100"),
    ],
)
def test_a_wrong_job_file_is_refused_in_words(text: str, override: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "j.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_job(file, [override])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"command": ["train.py", "a\0b"]}, "expected no null character"),
        ({"environment": {"A": "a\0b"}}, "expected no null character"),
        ({"folder": "/tmp/\0"}, "expected no null character"),
        ({"command": ["train.py", "\ud800"]}, "expected characters that UTF-8 has"),
        ({"workers_per_node": 10**9}, "workers_per_node=1000000000: expected a number >= 1 and <= 1024"),
        ({"min_nodes": 10**9, "max_nodes": 10**9}, "max_nodes <= 1000000"),
        ({"command": ["train.py", "a" * 200_000]}, "200000 bytes: expected <= 131072"),
        ({"command": ["train.py"] * 200_000}, "characters: expected <= 1048576"),
        ({"name": "../../trav"}, "name='../../trav'"),
        ({"python": "venv/bin/python"}, "python='venv/bin/python': expected the absolute path of an interpreter"),
        ({"activate": ["a\0"]}, "expected no null character"),
        ({"environment": {"UNICRON_TOKEN": "x"}}, "scripts do not get the coordinator's token"),
        ({"secrets": {"A": "env:UNICRON_TOKEN"}}, "secrets: 'A'='env:UNICRON_TOKEN': expected file:/PATH, or env:NAME"),
        ({"secrets": {"A": "file:key"}}, "secrets: 'A'='file:key': expected file:/PATH, or env:NAME"),
        ({"secrets": {"A": "hunter2"}}, "secrets: 'A': expected file:/PATH, or env:NAME"),
        ({"secrets": {"A": "env:B"}, "environment": {"A": "b"}}, "a variable that is not in environment"),
        ({"time_limit_seconds": 0.0}, "time_limit_seconds=0.0: expected a number > 0"),
        ({"after": ["bad"]}, "after=['bad']: expected up to 1000 different names of other tasks"),
        ({"after": ["a", "a"]}, "after=['a', 'a']: expected up to 1000 different names of other tasks"),
        ({"python": "/no/such/venv"}, "python=/no/such/venv: expected an interpreter or a virtual environment"),
        ({"secrets": {"A": "file:/no/such"}}, "secrets.A=file:/no/such: expected a readable text file"),
        ({"folder": "/no/such/folder"}, "FileNotFoundError"),
    ],
)
async def test_a_job_that_cannot_be_launched_is_reported_and_the_daemon_lives(
    tmp_path: Path, bad: dict[str, Any], said: str
) -> None:
    job = Job(**{"name": "bad", "command": ["train.py"], **bad})
    wrong = problem(job)
    assert (wrong is None) == ("/no/such" in str(bad))
    daemon = Daemon(options(logs=str(tmp_path), endpoint="127.0.0.1:1"))
    before = len(os.listdir("/proc/self/fd"))
    daemon._run(NodeRun(launches=[Launch(job=job, slot="0")]))
    (report,) = daemon._tasks()
    assert (report.pid, report.starts, report.code) == (None, 1, CANT_START)
    assert said in report.reason
    assert len(report.reason) < 800
    assert report.reason.isprintable()
    assert "trav" not in os.listdir(tmp_path.parent)
    daemon._run(NodeRun(launches=[]))
    await daemon._stop_all()
    assert daemon._tasks() == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("slot", ["1", "", "../../slot", "a\nb"])
async def test_a_launch_in_a_slot_that_the_node_does_not_have_fails_alone(tmp_path: Path, slot: str) -> None:
    daemon = Daemon(options(logs=str(tmp_path / "logs"), endpoint="127.0.0.1:1"))
    daemon._run(NodeRun(launches=[Launch(job=Job(name="j", command=["train.py"]), slot=slot)]))
    (report,) = daemon._tasks()
    assert (report.pid, report.code) == (None, CANT_START)
    assert "expected one of ['0']" in report.reason
    assert os.listdir(tmp_path) == []
    await daemon._stop_all()


def test_a_job_of_usual_size_can_be_launched() -> None:
    job = Job(name="j", command=["train.py", "--x", "a" * 10_000], environment={"A": "é" * 1000}, folder="/tmp")
    assert problem(job) is None


async def test_a_link_that_is_cancelled_while_its_connection_ends_is_cancelled() -> None:
    ending = asyncio.Event()

    async def write() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.sleep(0)

    async def connected() -> None:
        writer = asyncio.create_task(write())
        await asyncio.sleep(0)
        await end_tasks([writer])

    link = asyncio.create_task(connected())
    await ending.wait()
    link.cancel()
    with pytest.raises(asyncio.CancelledError):
        await link
