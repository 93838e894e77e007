"""TP and PP of a running task: one order, one checkpoint, one new life, whatever dies in between."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from coordinator.driver import FakeAgent, World, members, settle, share
from coordinator.membership.test_replicas import agents, start

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation.answers import Knowledge, allocation_of, layouts_of, state_of
from unicron_lightning.coordinator.config import PlannerConfig
from unicron_lightning.coordinator.events import Competitor, Question
from unicron_lightning.coordinator.orders.relayout import completed, refusal
from unicron_lightning.coordinator.severity.workflow import ATTEMPT_SECONDS
from unicron_lightning.coordinator.state import Cluster, decode_lasting, decode_task, encode
from unicron_lightning.jobs import Job
from unicron_lightning.planner.performance.description import TransformerProfile
from unicron_lightning.planner.solver import solve
from unicron_lightning.terms import Terms

SLICES = wire.Layout(tensor=2, pipeline=1)
STAGES = wire.Layout(tensor=1, pipeline=2)
SPREAD = wire.Spread(
    layout=STAGES,
    ordered=False,
    workers=4,
    micro_batches=4,
    tensor_divides={"num_attention_heads": 6},
    pipeline_divides={"num_layers": 4},
)


def grid(names: str = "abcd", nodes: tuple[int, int] = (2, 4), **spread: Any) -> World:
    """Create a task of agents with one worker each, which have reported a layout of two stages."""
    world = World()
    start(world, names, nodes)
    tell(world, **spread)
    return world


def tell(world: World, **spread: Any) -> None:
    """Have the first member report the layout of the model."""
    first = world.task().members()[0]
    about = msgspec.structs.replace(SPREAD, **spread)
    word = wire.Replicas(worker=first.worker, epoch=world.task().number, replicas=[], spread=about)
    agents(world)[first.agent].say(word)


def order(world: World, layout: wire.Layout = SLICES) -> None:
    assert refusal(world.task(), layout) is None
    world.do(ev.Relayout(task="t", layout=layout))


def part(world: World, agent: str, step: int = 7) -> None:
    """Have a member report that it waits and that the checkpoint is written."""
    agents(world)[agent].saved(f"/ckpt/{step}", step, parting=True)


def paths(welcome: wire.Welcome) -> tuple[str, ...]:
    return tuple(checkpoint.path for checkpoint in welcome.resume)


def again(world: World, names: str = "abcd") -> list[wire.Welcome]:
    """Restart the agents' workers, which form a settled epoch; return the layouts in their welcomes."""
    stopped = [agents(world)[name].rendezvous() for name in names]
    welcomes = [agent.launch().hello() for agent in stopped]
    for agent in stopped:
        agent.ready(0)
    settle(world)
    return welcomes


def test_the_members_write_a_checkpoint_and_the_next_life_has_the_layout() -> None:
    world = grid()
    before = members(world)
    order(world)
    epoch = world.task().epoch
    assert (epoch.kind, [member.worker for member in epoch.members]) == ("relayout", before)
    settle(world)
    part(world, "c")
    assert all(agents(world)[name].stopped for name in "abcd")
    assert not any(agents(world)[name].all(wire.Fence) for name in "abcd"), "restarts of torchrun's are not used up"
    part(world, "a")  # reported late
    assert world.event("layout_changes").fields == {"tp": 2, "pp": 1, "before": {"tp": 1, "pp": 2}, "step": 7}
    assert world.names().count("task_restarts") == 1 and world.event("task_restarts").incident is None
    for welcome in again(world):
        assert (welcome.layout, welcome.founder, paths(welcome)) == (SLICES, True, ("/ckpt/7",))
    assert "incident_closed" not in world.names() and world.task().incidents == 0


def test_a_joiner_is_told_the_layout_and_later_lives_keep_it() -> None:
    world = moved(step=True)
    agents(world)["d"].die()
    settle(world)
    late = agents(world)["d"].rendezvous()
    late.boot()
    assert (late.last(wire.Welcome).founder, late.last(wire.Welcome).layout) == (False, SLICES)
    settle(world)
    for name in "abcd":
        agents(world)[name].die()
    assert {welcome.layout for welcome in again(world)} == {SLICES}
    assert "layout_abandoned" not in world.names()


def test_a_replica_of_another_size_takes_other_nodes() -> None:
    world = grid(nodes=(1, 4))
    order(world, wire.Layout(tensor=2, pipeline=2))
    settle(world)
    part(world, "a")
    for name in "abc":
        agents(world)[name].rendezvous().boot()
    assert world.task().replica_nodes == 4
    assert world.task().epoch is None, "a life begins with a whole replica"
    agents(world)["d"].rendezvous().boot()
    assert len(members(world)) == 4


def test_a_death_before_the_checkpoint_is_healed_first() -> None:
    world = grid()
    order(world)
    settle(world)
    agents(world)["b"].die()
    assert world.task().epoch.kind == "fail"
    settle(world)
    assert world.task().epoch.kind == "relayout" and len(members(world)) == 3
    agents(world)["b"].rendezvous().boot()
    settle(world)
    assert world.task().epoch.kind == "relayout", "nobody joins any more"
    part(world, "a")
    assert {welcome.layout for welcome in again(world)} == {SLICES}


def test_a_world_too_small_for_it_grows_first() -> None:
    world = grid("ab", nodes=(1, 2), workers=2)
    order(world)
    agents(world)["b"].die()
    settle(world)
    assert world.task().epoch.kind == "fail"
    agents(world)["b"].rendezvous().boot()
    assert world.task().epoch.kind == "join"
    settle(world)
    assert world.task().epoch.kind == "relayout"


def test_without_a_survivor_the_order_is_void() -> None:
    world = grid()
    order(world)
    settle(world)
    agents(world)["a"].saved("/ckpt/4", 4)
    for name in "abcd":
        agents(world)[name].die()
    assert world.event("layout_abandoned").fields["tp"] == 2
    for welcome in again(world):
        assert (welcome.layout, paths(welcome)) == (None, ("/ckpt/4",))


def test_a_layout_in_which_no_step_is_finished_is_given_up() -> None:
    world = moved(step=False)
    assert "only just begun" in (refusal(world.task(), STAGES) or "has not begun to train")
    for name in "abcd":
        agents(world)[name].die(cause="exit", code=1)
    assert world.event("layout_abandoned").fields["reason"] == "no member was left before a step was finished in it"
    for welcome in again(world):
        assert (welcome.layout, paths(welcome)) == (None, ("/ckpt/7",))


def test_a_layout_in_which_a_worker_fails_twice_is_given_up() -> None:
    """The others are alive and wait for it: the task would neither continue nor end."""
    world = moved(step=False)
    for number in range(2):
        assert "layout_abandoned" not in world.names(), number
        fail_and_return(world, "d", step=7)
    reason = world.event("layout_abandoned").fields["reason"]
    assert reason.startswith("no way into a layout: failed 2 times at step 7; the last: ") and "exit 77" in reason
    assert world.names().count("task_restarts") == 2 and world.task().life == 3
    for welcome in again(world):
        assert (welcome.layout, welcome.founder, paths(welcome)) == (None, True, ("/ckpt/7",))
    tell(world)
    for _ in range(3):
        fail_and_return(world, "d", step=8)
    assert world.names().count("task_restarts") == 2, "in a layout that has worked it is a failure as any"
    assert not {"node_cordoned", "task_stopped"} & set(world.names())


def fail_and_return(world: World, name: str, step: int) -> None:
    """A member fails, the others continue from that step, and its successor joins them if permitted."""
    world.advance(2 * ATTEMPT_SECONDS)
    settle_all(world, step)
    agents(world)[name].die(cause="exit", code=77)
    settle_all(world, step)
    agent = agents(world)[name].rendezvous()
    if world.task().epoch is not None:
        agent.boot()
        settle_all(world, step)


def settle_all(world: World, step: int) -> None:
    """Settle one epoch after the other, until no other follows."""
    while (epoch := world.task().epoch) is not None and not world.task().settled:
        for member in epoch.members:
            agents(world)[member.agent].ready(epoch.number, step=step)


def test_a_layout_that_cannot_be_built_is_given_up() -> None:
    world = grid()
    order(world)
    settle(world)
    part(world, "a")
    peers = [agents(world)[name].rendezvous() for name in "abcd"]
    for peer in [*peers, peers[0]]:
        assert "layout_abandoned" not in world.names()
        assert peer.launch().hello().layout == SLICES
        peer.die(cause="exit", code=1)
        peer.rendezvous()
    assert world.event("layout_abandoned").fields["tp"] == 2
    assert {welcome.layout for welcome in again(world)} == {None}
    assert not {"node_cordoned", "task_stopped"} & set(world.names())


@pytest.mark.parametrize("when", ["ordered", "published", "settled", "moved", "started"])
def test_a_restarted_coordinator_goes_on_with_it(when: str) -> None:
    world = grid()
    peers = [agents(world)[name] for name in "abcd"]
    steps = {
        "ordered": lambda: world.do(ev.Relayout(task="t", layout=SLICES)),
        "published": lambda: None,  # in the same turn
        "settled": lambda: settle(world),
        "moved": lambda: part(world, "a"),
        "started": lambda: again(world),
    }
    for name, does in steps.items():
        does()
        if name == when:
            world.start()
            for peer in peers:
                peer.register()
    assert world.task().layouts.in_force == SLICES
    assert {peer.last(wire.Welcome).layout for peer in peers} == {SLICES}


def test_workers_tell_a_coordinator_that_has_lost_its_store() -> None:
    world = moved(step=True)
    peers = list(agents(world).values())
    world.lose_disk()
    world.start()
    for peer in peers:
        peer.register()
    world.advance(11)
    settle(world)
    assert world.task().layouts.in_force is None
    tell(world, layout=SLICES, ordered=True)
    assert world.task().layouts.in_force == SLICES


def test_those_that_wait_are_started_anew_even_if_the_order_is_forgotten() -> None:
    world = grid()
    part(world, "a")
    assert {(welcome.layout, paths(welcome)) for welcome in again(world)} == {(None, ("/ckpt/7",))}


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ((3, 1), "tp=3, pp=1: a replica of 3 workers; expected a divisor of the 4 declared (devices x num_nodes)"),
        ((4, 1), "tp=4: expected a divisor of the model's num_attention_heads=6"),
        ((1, 4), "pp=4: expected a divisor of the model's num_layers=6"),
        ((1, 2), "tp=1, pp=2: that is what the task has"),
        ((1, 1), "tp=1, pp=1: 4 replicas; expected a divisor of a step's 6 micro-batches"),
    ],
)
def test_what_the_model_cannot_have_is_refused(layout: tuple[int, int], reason: str) -> None:
    world = grid(micro_batches=6, pipeline_divides={"num_layers": 6})
    assert refusal(world.task(), wire.Layout(tensor=layout[0], pipeline=layout[1])) == reason


def test_what_the_task_cannot_have_now_is_refused() -> None:
    world = World()
    start(world, "abcd", (2, 4))
    assert refusal(world.task(), SLICES) == (
        "tp=2, pp=1: the task 't' has not begun to train, or is of a strategy without layouts"
    )
    tell(world, workers=8)
    assert refusal(world.task(), wire.Layout(tensor=2, pipeline=4)) == (
        "tp=2, pp=4: a replica takes 8 workers, the task has 4 now"
    )
    order(world)
    assert refusal(world.task(), STAGES) == "tp=1, pp=2: the task is on its way to tp=2, pp=1 already"


def test_another_number_of_workers_divides_the_experts() -> None:
    divided, whole = wire.Layout(tensor=1, pipeline=1, expert=2), wire.Layout(tensor=1, pipeline=1)
    sizes: dict[str, Any] = {"tensor_divides": {}, "pipeline_divides": {}, "expert_divides": {"num_moe_experts": 2}}
    world = grid(layout=divided, micro_batches=4, **sizes)
    assert refusal(world.task(), divided) == "tp=1, pp=1, ep=2: that is what the task has"
    assert refusal(world.task(), whole) is None
    assert refusal(world.task(), wire.Layout(tensor=2, pipeline=1, expert=2)) is None
    assert refusal(world.task(), wire.Layout(tensor=1, pipeline=1, expert=4)) == (
        "ep=4: expected a divisor of the model's num_moe_experts=2"
    )
    assert refusal(grid(layout=whole, micro_batches=6, **sizes).task(), divided) == (
        "tp=1, pp=1, ep=2: 2 replicas of 2 data-parallel lanes; expected a divisor of a step's 6 micro-batches"
    )
    assert refusal(grid().task(), divided) == "tp=1, pp=1, ep=2: the task's model has no experts; expected ep=1"


def test_parts_of_sequences_stay() -> None:
    parts = wire.Layout(tensor=1, pipeline=2, context=2)
    sizes: dict[str, Any] = {"tensor_divides": {}, "expert_divides": {"num_moe_experts": 6}}
    world = grid(layout=parts, micro_batches=2, **sizes)
    named = completed(world.task(), SLICES)
    assert named == wire.Layout(tensor=2, pipeline=1, context=2) and refusal(world.task(), named) is None
    assert refusal(world.task(), SLICES) == (
        "tp=2, pp=1: the task has tp=1, pp=2, cp=2; the context-parallel size cannot be changed"
    )
    by_two = completed(world.task(), wire.Layout(tensor=1, pipeline=1, expert=2), names_experts=True)
    assert refusal(world.task(), by_two) is None, "its two replicas have a lane each"
    by_three = completed(world.task(), wire.Layout(tensor=1, pipeline=1, expert=3), names_experts=True)
    assert refusal(grid(layout=parts, workers=6, **sizes).task(), by_three) == (
        "tp=1, pp=1, cp=2, ep=3: expected a multiple or a divisor of cp=2 for ep"
    )


def test_another_number_of_shards() -> None:
    """Replicas may have different numbers of micro-batches, and a layout is of the task's kind."""
    halves = wire.Layout(tensor=2, pipeline=1, sharded=True)
    world = grid(layout=halves, micro_batches=6, tensor_divides={}, pipeline_divides={})
    assert refusal(world.task(), halves) == "shards=2: that is what the task has"
    assert refusal(world.task(), STAGES) == "tp=1, pp=2: the task has shards=2; expected shards"
    assert refusal(world.task(), wire.Layout(tensor=3, pipeline=1, sharded=True)) == (
        "shards=3: a replica of 3 workers; expected a divisor of the 4 declared (devices x num_nodes)"
    )
    assert refusal(grid().task(), halves) == "shards=2: the task has tp=1, pp=2; expected tp and pp"
    order(world, wire.Layout(tensor=1, pipeline=1, sharded=True))
    settle(world)
    part(world, "a")
    assert {welcome.layout for welcome in again(world)} == {wire.Layout(tensor=1, pipeline=1, sharded=True)}


def test_nodes_have_to_be_enough_for_a_replica() -> None:
    world = grid("abc", nodes=(3, 3), workers=6, micro_batches=6)
    assert refusal(world.task(), SLICES) == (
        "tp=2, pp=1: a replica takes 2 nodes; expected a multiple of that from 3 to 3 (its --nnodes)"
    )


def moved(*, step: bool) -> World:
    """Create a task that has just changed its layout, and has finished a step or not."""
    world = grid()
    order(world)
    settle(world)
    part(world, "a")
    again(world)
    tell(world, layout=SLICES, ordered=True)
    if step:
        first: FakeAgent = agents(world)[world.task().members()[0].agent]
        first.say(wire.WorkerEvent(worker=first.worker(), name="started", at=world.now, fields={"step": 8}))
    return world


def named(layouts: dict[int, list[int]]) -> World:
    """Submit the task as a job that names its layouts."""
    world = World()
    job = Job(name="t", command=["train.py"], min_nodes=2, max_nodes=4, layouts=layouts)
    world.do(ev.Submit(jobs=(job,)))
    start(world, "abcd", (2, 4))
    tell(world)
    return world


def finish_step(world: World, name: str, step: int) -> None:
    """Have the first member report the first finished step of the epoch."""
    first = agents(world)[world.task().members()[0].agent]
    fields = {"epoch": world.task().number, "step": step}
    first.say(wire.WorkerEvent(worker=first.worker(), name=name, at=world.now, fields=fields))


def test_the_layout_that_a_job_names_for_its_slots_is_ordered() -> None:
    """Four slots take TP 2, two take PP 2 again: each is ordered once a step is made with that many."""
    world = named({2: [1, 2], 4: [2, 1]})
    assert "layout_ordered" not in world.names(), "no step is finished yet"
    finish_step(world, "started", 1)
    assert world.event("layout_ordered").fields == {"tp": 2, "pp": 1, "before": {"tp": 1, "pp": 2}, "by": "plan"}
    settle(world)
    part(world, "a")
    assert {welcome.layout for welcome in again(world)} == {SLICES}
    tell(world, layout=SLICES, ordered=True)
    finish_step(world, "started", 8)
    assert world.names().count("layout_ordered") == 1, "it has the layout"
    for name in "cd":
        agents(world)[name].die()
    settle_all(world, 9)
    assert world.names().count("layout_ordered") == 1
    agents(world)["d"].bye(succeeded=False)
    agents(world)["c"].bye(succeeded=False)
    settle_all(world, 9)
    finish_step(world, "recovered", 9)
    assert world.task().layouts.ordered == STAGES, "two slots are left"
    settle_all(world, 9)
    part(world, "a", 9)
    assert {(welcome.layout, paths(welcome)[0]) for welcome in again(world, "ab")} == {(STAGES, "/ckpt/9")}


class Planned(World):
    """A world whose planner chooses layouts."""

    layouts: dict[str, wire.Layout]

    def answer(self) -> None:
        while self.questions:
            question = self.questions.pop()
            self.do(ev.Planned(key=question.key, allocation=share(question), layouts=self.layouts))


def test_a_job_that_leaves_its_layout_to_the_plan_gets_that_of_the_plan() -> None:
    """The planner is asked also for a single task, and another layout with equal slots is ordered at once."""
    world = Planned()
    world.nodes, world.layouts = (2, 4), {"t": SLICES}
    world.do(ev.Submit(jobs=(Job(name="t", command=["x"], min_nodes=2, max_nodes=4, auto_layouts=True),)))
    started = [world.agent(name, place=f"{name}/0").start() for name in "abcd"]
    for agent in started:
        agent.granularity = 2
        agent.boot()
    for _ in started:
        settle(world)
    tell(world)
    assert "layout_ordered" not in world.names(), "no step is finished yet"
    finish_step(world, "started", 1)
    assert world.event("layout_ordered").fields == {"tp": 2, "pp": 1, "before": {"tp": 1, "pp": 2}, "by": "plan"}
    assert decode_lasting(encode(world.machine.lasting)).layouts == {"t": SLICES}
    settle(world)
    part(world, "a")
    assert {welcome.layout for welcome in again(world)} == {SLICES}


def test_the_shape_that_workers_report_is_kept_for_later_lives() -> None:
    world = grid(transformer={"num_layers": 4})
    tell(world)
    assert world.task().layouts.transformer == {"num_layers": 4}
    assert decode_task(encode(world.task())).layouts.transformer == {"num_layers": 4}


def test_the_planner_names_the_layouts_of_the_analytic_model() -> None:
    cluster = Cluster()
    shape = TransformerProfile(
        num_layers=12,
        hidden_size=8192,
        num_heads=64,
        sequence_length=2048,
        vocabulary_size=51200,
        global_batch_size=8,
        accelerator="A100",
    )
    auto = Job(name="auto", command=["x"], max_nodes=8, transformer=shape, auto_layouts=True)
    cluster.lasting.jobs = {"auto": auto, "given": msgspec.structs.replace(auto, name="given", auto_layouts=False)}
    tasks = tuple(
        Competitor(name=name, terms=Terms(max_workers=4), runs=True, before=4, left=4) for name in ("auto", "given")
    )
    question = Question(key="k", num_places=8, node_places=1, tasks=tasks)
    known = Knowledge.of(cluster, PlannerConfig())
    plan = solve(state_of(question, known))
    best = known.performances["auto"].configuration(4)
    assert best is not None and best.num_workers == 4 > best.data_parallel, "one accelerator would not do"
    assert allocation_of(question, plan) == {"auto": 4, "given": 4}
    chosen = wire.Layout(tensor=best.tensor_parallel, pipeline=best.pipeline_parallel)
    assert layouts_of(question, plan, known) == {"auto": chosen}
    assert known.relayout_seconds("auto") > 0 == known.relayout_seconds("given")


def test_a_named_layout_that_has_failed_is_not_ordered_again() -> None:
    world = named({4: [2, 1]})
    finish_step(world, "started", 1)
    settle(world)
    part(world, "a")
    again(world)
    for name in "abcd":
        agents(world)[name].die(cause="exit", code=1)
    assert world.task().layouts.failed == [SLICES]
    again(world)
    tell(world)
    peers = list(agents(world).values())
    world.start()  # the coordinator remembers
    for peer in peers:
        peer.register()
    settle_all(world, 7)
    finish_step(world, "started", 8)
    assert world.names().count("layout_ordered") == 1
    assert refusal(world.task(), SLICES) is None, "an operator may order it"


def test_a_named_layout_that_does_not_fit_is_not_ordered() -> None:
    world = named({2: [1, 2], 4: [3, 1]})
    finish_step(world, "started", 1)
    assert "layout_ordered" not in world.names()
