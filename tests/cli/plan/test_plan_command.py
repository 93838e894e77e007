"""`unicron plan` as a user meets it: a real process, a file in, a table, JSON or a picture out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("with_figures")

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "conf" / "examples" / "six_tasks_128_gpus.yaml"
KINDS = EXAMPLE.with_name("two_kinds.yaml")
SMALL = """
cluster: {num_nodes: 4, workers_per_node: 4, unit: 4}
failures: {node_mtbf_hours: 1000}
tasks:
  a:
    transition_seconds: 10
    performance: {flops: {4: 1e15, 8: 1.9e15, 12: 2.7e15}}
    accelerators: {node0: 4, node1: 4}
  b:
    weight: 2
    transition_seconds: 10
    performance: {csv: b.csv}
    accelerators: {node2: 4, node3: 4}
queued:
  c: {weight: 5, transition_seconds: 1, performance: {flops: {8: 2e15}}}
"""
TABLE = """
workers, tflops_per_worker, tensor_parallel, pipeline_parallel, data_parallel, micro_batch_size
4, 200, 2, 1, 2, 1
8, 190, 2, 1, 4, 1
"""


def unicron(*arguments: str | Path, code: str = "") -> subprocess.CompletedProcess[str]:
    program = f"{code}\nfrom unicron_lightning.cli import main; main()"
    command = [sys.executable, "-c", program, "plan", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def answer(*arguments: str | Path) -> dict:
    done = unicron(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "b.csv").write_text(TABLE)
    (tmp_path / "small.yaml").write_text(SMALL)
    return tmp_path / "small.yaml"


def test_json_says_everything(small: Path) -> None:
    plan = answer(small)["plan"]
    assert plan["num_workers"] == 16
    assert plan["running_seconds"] == pytest.approx(1000 * 3600 / 4)
    assert {name: task["num_workers"] for name, task in plan["tasks"].items()} == {"a": 8, "b": 8}
    assert plan["waf_flops_per_second"] == pytest.approx(1.9e15 + 2 * 8 * 190e12)
    assert plan["reward_flop"] == pytest.approx(plan["waf_flops_per_second"] * plan["running_seconds"])
    assert plan["moves"] == []
    b = plan["tasks"]["b"]
    assert (b["num_workers_before"], b["changed"], b["nodes"]) == (8, False, {"node2": 4, "node3": 4})
    assert b["configuration"] == {
        "tensor_parallel": 2, "pipeline_parallel": 1, "data_parallel": 4, "micro_batch_size": 1,
        "context_parallel": 1, "expert_parallel": 1,
    }  # fmt: skip
    assert plan["tasks"]["a"]["gain_of_last_flop"] == pytest.approx(0.9e15 * 9e5 + 1.9e16, rel=1e-6)


def test_a_lost_node_is_planned_for(small: Path) -> None:
    after = answer(small, "--what-if", "node-loss", "node3")["what_if"]
    assert after["num_workers"] == 12
    assert after["running_seconds"] == pytest.approx(1000 * 3600 / 3)
    assert {name: task["num_workers"] for name, task in after["tasks"].items()} == {"a": 4, "b": 8}
    assert after["tasks"]["b"]["num_workers_lost"] == 4
    (given,) = [move for move in after["moves"] if move["source"] == "node3"]
    assert given["task"] == "b" and given["target"] in ("node0", "node1")
    assert after["num_moved_accelerators"] == 4


def test_a_task_loses_a_node_of_its_own(small: Path) -> None:
    after = answer(small, "--what-if", "node-loss", "a")["what_if"]
    assert (after["num_workers"], after["tasks"]["a"]["num_workers_lost"]) == (12, 4)


def test_a_node_joins(small: Path) -> None:
    after = answer(small, "--what-if", "join")["what_if"]
    assert (after["num_workers"], after["tasks"]["a"]["num_workers"]) == (20, 12)
    assert after["tasks"]["a"]["nodes"]["new0"] == 4


def test_a_repaired_node_joins(small: Path) -> None:
    both = answer(small, "--set", "cluster.nodes.node3.state=failed", "--what-if", "join", "node3")
    assert (both["plan"]["num_workers"], both["what_if"]["num_workers"]) == (12, 16)
    assert both["plan"]["tasks"]["b"]["num_workers_lost"] == 4
    assert "node3" in {**both["what_if"]["tasks"]["a"]["nodes"], **both["what_if"]["tasks"]["b"]["nodes"]}


def test_a_task_ends_and_another_is_launched(small: Path) -> None:
    ended = answer(small, "--what-if", "finish", "b")["what_if"]
    assert (list(ended["tasks"]), ended["tasks"]["a"]["num_workers"]) == (["a"], 12)
    assert {move["task"] for move in ended["moves"] if move["target"] is None} == {"b"}
    launched = answer(small, "--what-if", "launch", "c")["what_if"]
    assert launched["tasks"]["c"]["num_workers"] == 8
    assert sum(task["num_workers"] for task in launched["tasks"].values()) == 16


def test_values_can_be_set(small: Path) -> None:
    plan = answer(small, "--set", "tasks.a.weight=4", "--set", "tasks.a.transition_seconds=0")["plan"]
    assert (plan["tasks"]["a"]["weight"], plan["tasks"]["a"]["num_workers"]) == (4, 12)


def test_where_only_numbers_are_known_a_placement_is_assumed(small: Path) -> None:
    text = SMALL.replace("accelerators: {node0: 4, node1: 4}", "workers: 8")
    small.write_text(text)
    done = unicron(small)
    assert done.returncode == 0
    assert "the present places are assumed" in done.stdout
    assert answer(small)["plan"]["moves"] == []


def test_the_table_shows_tasks_gains_and_moves(small: Path) -> None:
    done = unicron(small, "--what-if", "node-loss", "node3")
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "small.yaml",
        "if node3 fails (4 of b)",
        "TP2 PP1 DP4 b1",
        "until the next failure",
        "b: 4 node3 -> ",
    ):
        assert words in done.stdout


def test_a_paused_task_states_what_it_would_earn_and_cost(small: Path) -> None:
    greedy = ["--set", "tasks.b.weight=0.2", "--set", "tasks.a.performance.flops={4: 1e15, 8: 1.9e15, 16: 3.5e15}"]
    done = unicron(small, *greedy)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = re.findall(r"^paused: b: (.*)$", done.stdout, re.MULTILINE)
    earned, cost = (float(text.replace(",", "")) for text in re.findall(r"([\d,.]+)(?: TFLOP|$)", line))
    assert line.startswith("4 workers would bring ") and 0 < earned < cost
    assert "may_pause is not stated for b, so that the plan may pause them" in done.stdout
    assert "paused: b" not in unicron(small, *greedy, "--set", "fair=min").stdout
    stated = unicron(small, *greedy, "--set", "fair=min", "--set", "tasks.b.may_pause=true").stdout
    assert "paused: b" in stated and "is not stated" not in stated


def test_the_example_is_the_one_in_the_repository_and_works(tmp_path: Path) -> None:
    shown = unicron("--example")
    assert shown.stdout == EXAMPLE.read_text()
    (tmp_path / "mine.yaml").write_text(shown.stdout)
    both = answer(tmp_path / "mine.yaml", "--what-if", "node-loss", "gpt-7b", "--picture", tmp_path / "p.png")
    assert (both["plan"]["num_workers"], len(both["plan"]["tasks"]), both["what_if"]["num_workers"]) == (128, 6, 120)
    assert both["plan"]["infeasible"] == []
    assert both["what_if"]["waf_flops_per_second"] < both["plan"]["waf_flops_per_second"]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_tasks_get_the_kinds_on_which_they_bring_most() -> None:
    """The second example: 64 A100, 64 H100; one transformer for both kinds."""
    shown = unicron("--example", "two_kinds")
    assert shown.stdout == KINDS.read_text()
    both = answer(KINDS, "--what-if", "node-loss", "h0")
    tasks, after = both["plan"]["tasks"], both["what_if"]["tasks"]
    assert both["plan"]["gap_flop"] == both["what_if"]["gap_flop"] == 0
    moved = tasks["gpt-7b"]
    assert (moved["kind_before"], moved["kind"], moved["relayout"], moved["num_workers"]) == ("a100", "h100", True, 64)
    assert set(moved["nodes"]) == {f"h{place}" for place in range(8)}
    assert (tasks["gpt-18b"]["kind"], tasks["gpt-18b"]["num_workers"]) == ("a100", 64)
    assert (after["gpt-7b"]["num_workers"], after["gpt-7b"]["num_workers_lost"]) == (48, 8)
    assert after["gpt-18b"]["changed"] is False
    text = unicron(KINDS).stdout
    assert "a100 -> h100" in text and "paused: old: 8 workers would bring 1,000.0 TFLOP/s of WAF" in text
    joined = answer(KINDS, "--what-if", "join", "h100")["what_if"]
    assert {task["kind"] for task in joined["tasks"].values() if "new0" in task["nodes"]} == {"h100"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("cluster.nodes.h0.kind=''", "cluster.nodes.h0.kind is missing: expected a kind, which other nodes have"),
        (
            "tasks.old.performance.kinds.b200.flops={8: 1e15}",
            "tasks.old: performance.kinds.b200: no such kind, expected those of the cluster, a100, h100",
        ),
        (
            "tasks.gpt-7b.performance.transformer.accelerator=A100",
            "tasks.gpt-7b: performance: one for accelerators of kinds a100, h100: expected kinds, or transformer",
        ),
        (
            "tasks.gpt-7b.accelerators.h3=8",
            "tasks.gpt-7b.accelerators: on nodes of kinds a100, h100: expected nodes of one kind",
        ),
        ("tasks.old.workers=8", "tasks.old.kind is missing: expected the kind of its workers, one of a100, h100"),
        (
            "quotas.team={tasks: [measured, old], guaranteed: 8}",
            "quota 'team': tasks can run on several kinds (measured on a100 and h100, old on a100): expected one kind",
        ),
        ("tasks.old.kind=b200", "tasks.old.kind='b200': expected one of a100, h100"),
        ("cluster.accelerators.a100=A1000", "cluster.accelerators.a100=A1000: expected one of A100, A800, H100, H200"),
    ],
)
def test_what_is_wrong_about_kinds_is_one_line_that_names_it(change: str, words: str) -> None:
    done = unicron(KINDS, "--set", change)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_quota_guarantees_and_limits_the_workers_of_its_tasks(small: Path) -> None:
    held = answer(small, "--set", "quotas.team={tasks: [a], most: 4}")["plan"]
    assert (held["tasks"]["a"]["num_workers"], held["quotas"]["team"]["num_workers"]) == (4, 4)
    greedy = ("--set", "tasks.b.performance.csv=null", "--set", "tasks.b.performance.flops={8: 5e16, 16: 9e16}")
    assert answer(small, *greedy)["plan"]["tasks"]["a"]["num_workers"] == 0
    said = unicron(small, *greedy, "--set", "quotas.team={tasks: [a, c], guaranteed: 8}").stdout
    assert "quota team: 8 workers (guaranteed 8)" in said
    paused = unicron(small, "--set", "quotas.team={tasks: [a, c], most: 0}").stdout
    assert "quota team: 0 workers (guaranteed 0, at most 0)" in paused
    assert "paused: a: no plan has room for its minimum of workers" in paused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("quotas.team={tasks: [x]}", "quotas.team.tasks: no task 'x': expected some of a, b, c"),
        (
            "quotas.team={tasks: [a], guaranteed: 8, most: 4}",
            "quota 'team': most=4: expected at least its guaranteed=8",
        ),
        ("quotas.team={tasks: [a], guaranteed: -1}", "quota 'team': guaranteed=-1: expected 0 or more workers"),
        ("quotas={x: {tasks: [a, b]}, y: {tasks: [b]}}", "task 'b' is in quotas 2 times: expected it once"),
        ("quotas.team.guaranteed=4", "quotas.team.tasks is missing: expected a list of texts"),
        (
            "tasks.a.may_pause=false quotas.team={tasks: [a], most: 3}",
            "quota 'team': at most 0 workers: expected 4, which its tasks need that may not be paused",
        ),
    ],
)
def test_what_is_wrong_about_quotas_is_one_line_that_names_it(small: Path, change: str, words: str) -> None:
    done = unicron(small, *(part for each in re.split(r" (?=\w+\.)", change) for part in ("--set", each)))
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_replicas_stay_in_an_island_where_they_fit(small: Path) -> None:
    """TP 2 x DP 4 of b in groups of 8: a node has 4, and an island of two nodes holds the group."""
    text = SMALL.replace("    accelerators: {node2: 4, node3: 4}\n", "").replace("{node0: 4, node1: 4}", "{node1: 4}")
    small.write_text(text)
    grouped = ["--set", "tasks.b.replica_size=8", "--set", "tasks.a.max_workers=4"]
    rack = [*grouped, "--set", "cluster.nodes={node0: {island: r}, node3: {island: r}}"]
    assert answer(small, *grouped)["plan"]["tasks"]["b"]["num_island_spanning_accelerators"] == 0
    placed = answer(small, *rack)["plan"]["tasks"]["b"]
    assert (placed["nodes"], placed["num_island_spanning_accelerators"]) == ({"node0": 4, "node3": 4}, 0)
    small.write_text(text.replace("{node1: 4}", "{node0: 4}"))
    said = unicron(small, *rack).stdout
    assert "accelerators of replicas, or groups, that do not share an island: b 8" in said
    alone = unicron(small, "--island-label", "rack")
    assert (alone.returncode, alone.stderr) == (
        2,
        "unicron: --island-label rack: expected it with --nodes, whose nodes have the label\n",
    )


@pytest.mark.parametrize("suffix", ["svg", "pdf"])
def test_pictures_have_the_format_of_their_name(small: Path, suffix: str) -> None:
    picture = small.with_name(f"p.{suffix}")
    assert unicron(small, "--picture", picture).returncode == 0
    assert picture.read_bytes()[:5] in (b"<?xml", b"%PDF-")


def test_without_matplotlib_the_picture_says_what_to_install(small: Path) -> None:
    done = unicron(small, "--picture", "p.png", code="import sys; sys.modules['matplotlib'] = None")
    assert done.returncode == 2
    assert "matplotlib is not installed" in done.stderr and "unicron-lightning[picture]" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--set", "tasks.a.wieght=1"],
            "tasks.a.wieght=1: unknown key, expected one of performance, transition_seconds",
        ),
        (
            ["--set", "cluster.nodes.node3.sate=failed"],
            "cluster.nodes.node3.sate='failed': unknown key, expected one of",
        ),
        (["--set", "tasks.a.weight=much"], "tasks.a.weight='much': expected a number"),
        (["--set", "tasks.a.weight=-1"], "tasks.a: task 'a': weight=-1.0: expected a positive number"),
        (["--set", "cluster.nodes.node3.state=gone"], "cluster.nodes.node3.state='gone': expected one of ready"),
        (["--set", "tasks.a.performance.csv=b.csv"], "tasks.a.performance: given by flops, csv: expected exactly one"),
        (["--set", "tasks.b.performance.csv=no.csv"], "tasks.b: csv=no.csv: "),
        (["--set", "tasks.d.weight=1"], "tasks.d.performance is missing: expected a mapping"),
        (["--set", "tasks.a.accelerators.node9=4"], "tasks.a.accelerators.node9: no such node"),
        (["--set", "tasks.a.workers=4"], "tasks.a: workers and accelerators: expected only one"),
        (
            ["--set", "tasks.a.accelerators.node2=4", "--set", "cluster.num_nodes=5"],
            "node 'node2': 8 accelerators run on it, expected at most its 4",
        ),
        (["--set", "failures.node_mtbf_hours=0"], "failures.node_mtbf_hours=0: expected hours > 0"),
        (["--set", "failures={worker_failures: 3}"], "failures.worker_mtbf_hours is missing"),
        (["--set", "cluster.num_nodes=0"], "cluster.num_nodes=0: expected at least 1, or nodes by name"),
        (["--set", "nonsense"], "--set nonsense: expected key=value"),
        (["--what-if", "flood"], "--what-if flood: expected one of node-loss, join, finish, launch"),
        (["--what-if", "finish", "x"], "--what-if finish x: expected one of the tasks a, b"),
        (["--what-if", "launch", "a"], "--what-if launch a: expected one of the tasks c"),
        (["--what-if", "node-loss", "x"], "--what-if node-loss x: expected a ready node, or a task that has workers"),
        (["--what-if", "join", "node1"], "--what-if join node1: expected a node that is not ready"),
        (["--what-if", "join", "a", "b"], "--what-if join a b: expected an event and at most one name"),
        (["--picture", "p.xyz"], "--picture p.xyz: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_line_that_names_it(small: Path, arguments: list[str], words: str) -> None:
    done = unicron(small, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a mapping with cluster, failures and tasks"),
        ("a: [1", "bad.yaml: "),
        ("cluster: 3", "cluster=3: expected a mapping with num_nodes, nodes"),
        ("cluster: {num_nodes: 1}", "failures is missing"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    done = unicron(tmp_path / "bad.yaml")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_no_file() -> None:
    assert "no FILE: expected one" in unicron().stderr
    assert "no.yaml: " in unicron("no.yaml").stderr


def test_asking_a_coordinator_does_not_load_the_planner() -> None:
    code = "import sys; from unicron_lightning.cli import commands; commands._parser(); "
    code += "print({'numpy', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


def test_the_nodes_come_from_a_list_of_the_cluster(small: Path, tmp_path: Path) -> None:
    listed = tmp_path / "sinfo"
    listed.write_text(
        "".join(f"node{place} gpu:h100:4 {state}\n" for place, state in enumerate(["idle"] * 3 + ["down"]))
    )
    plan = answer(small, "--nodes", listed)["plan"]
    assert plan["num_workers"] == 12
    assert sum(task["num_workers"] for task in plan["tasks"].values()) == 12
    refused = unicron(small, "--nodes", tmp_path / "none")
    assert (refused.returncode, "--nodes" in refused.stderr, "expected a file" in refused.stderr) == (2, True, True)
