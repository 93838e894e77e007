"""Sharded models in a loop of one process: mistakes of the script, mixed precision, and checkpoints of whole models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp.preconditioned import Rotated, TwoFactors
from loop.test_run import DATA
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Muon

from unicron_lightning import Run
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.mesh import ShardGroup
from unicron_lightning.loop.registered import OF_SHARDS, others_of

pytestmark = pytest.mark.allow_leak("listening_sockets", reason="a process keeps its connection with itself")


class Setup:
    """A small sharded model, registered, beside one that is not trained."""

    def __init__(self, folder: Path, *, shards: bool = True, policy: MixedPrecisionPolicy | None = None) -> None:
        torch.manual_seed(1)
        self.run = Run(
            DATA, micro_batch_size=2, global_batch_size=8, seed=1, checkpoints=folder, shard_size=3 if shards else None
        )
        self.model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
        self.teacher = nn.Linear(2, 1).requires_grad_(False)
        if shards:
            fully_shard(self.model, mesh=self.run.mesh, mp_policy=policy or MixedPrecisionPolicy())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.run.register(model=self.model, teacher=self.teacher, optimizer=self.optimizer)

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        return nn.functional.mse_loss(self.model(batch[0]).float(), batch[1] + self.teacher(batch[0]))

    def train(self, steps: int, act: Callable[[Any], Any] = lambda step: None) -> list[float]:
        """Train; return the losses."""
        losses = []
        for step in self.run.steps(steps):
            losses.append(float(step.run(self.loss)))
            step.clip_grad_norm_(0.5)
            self.optimizer.step()
            act(step)
        return losses


Make = Callable[..., Setup]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda folder=tmp_path, **options: Setup(folder, **options)


@pytest.mark.parametrize("shards", [True, False])
def test_a_checkpoint_continues_in_whole_and_in_sharded_models(shards: bool, make: Make, tmp_path: Path) -> None:
    paths: list[str] = []
    first = make(shards=not shards)
    losses = first.train(6, lambda step: paths.append(first.run.save()) if step.number == 2 else None)
    assert [*torch.load(paths[0], weights_only=True)] == ["model", "teacher", "unicron_loop"]
    other = make(tmp_path / "other", shards=shards)
    other.run.load(paths[0])
    assert other.train(6) == pytest.approx(losses[2:], rel=1e-5)
    saved = [
        torch.load(made.run.save(tmp_path / f"{n}.ckpt"), weights_only=True) for n, made in enumerate((first, other))
    ]
    for key, value in saved[0]["model"].items():
        assert torch.allclose(value, saved[1]["model"][key], rtol=1e-5, atol=1e-7), key


def test_own_objects_of_shards() -> None:
    rest: dict[str, Any] = {"others": {"own": "common", "schedule": 1}}
    assert others_of(rest, 2, 3) == rest["others"], "of whole models"
    of_shards = [{"own": f"of shard {shard}"} for shard in range(3)]
    assert others_of({**rest, OF_SHARDS: of_shards}, 2, 3) == {"own": "of shard 2", "schedule": 1}
    assert others_of({**rest, OF_SHARDS: of_shards[:1]}, 2, 3) == {"own": "of shard 0", "schedule": 1}


def test_own_objects_that_differ_do_not_continue_in_another_number_of_shards() -> None:
    rest = {"others": {"own": 0}, OF_SHARDS: [{"own": 0}, {"own": 1}]}
    with pytest.raises(ConfigError, match=r"objects of 2 shards, which differ: \['own'\]; expected shard_size=2"):
        others_of(rest, 0, 3)


def test_mixed_precision_gathers_in_bfloat16_and_steps_in_float32(make: Make, tmp_path: Path) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    made, plain, seen = make(policy=policy), make(tmp_path / "plain"), set()
    made.model[0].register_forward_hook(lambda layer, inputs, output: seen.add(output.dtype))
    assert made.train(4) == pytest.approx(plain.train(4), rel=0.05)
    assert seen == {torch.bfloat16}
    assert {each.dtype for each in made.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("update", [Muon, TwoFactors, Rotated])
def test_updates_of_whole_matrices_are_those_of_whole_models(update: Any, make: Make, tmp_path: Path) -> None:
    """Beside a parameter that is not sharded, and with a schedule."""
    found: list[Setup] = []
    for shards in (True, False):
        torch.set_default_dtype(torch.float64)
        made = make(tmp_path / f"{shards}", shards=shards)
        shift = nn.Linear(2, 1, bias=False)
        whole = [each for each in (*made.model.parameters(), *shift.parameters()) if each.dim() == 2]
        other = update(whole, lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(other, 2, 0.5)
        made.run.register(other=other, shift=shift, schedule=schedule)

        def loss(batch: Any, made: Setup = made, shift: nn.Module = shift) -> torch.Tensor:
            return nn.functional.mse_loss(made.model(batch[0].double()) + shift(batch[0].double()), batch[1].double())

        for step in made.run.steps(6):
            step.run(loss, max_norm=0.3)
            other.step()
            schedule.step()
        found.append(made)
        torch.set_default_dtype(torch.float32)
    saved = [torch.load(made.run.save(tmp_path / f"{n}.ckpt"), weights_only=True) for n, made in enumerate(found)]
    for name in ("model", "shift"):
        for key, value in saved[0][name].items():
            torch.testing.assert_close(value, saved[1][name][key], rtol=0, atol=1e-12)


def test_the_norm_is_that_of_the_present_gradients(make: Make) -> None:
    made = make()
    for step in made.run.steps(1):
        step.run(made.loss)
        grads = [each.grad for each in made.model.parameters()]
        local = torch.cat([each.to_local().flatten() for each in grads if isinstance(each, DTensor)])
        assert float(step.clip_grad_norm_(1e-3)) == pytest.approx(float(local.norm()), rel=1e-6)
        assert float(step.clip_grad_norm_(1.0)) == pytest.approx(1e-3, rel=1e-3)


def stepping(act: Callable[[Setup, Any], Any]) -> Callable[[Setup], None]:
    def body(made: Setup) -> None:
        for step in made.run.steps(2):
            act(made, step)

    return body


def scaled(made: Setup) -> None:
    made.run.register(scaler=torch.amp.GradScaler("cpu"))
    made.run.steps(1)


def several(made: Setup) -> None:
    made.run.register(other=torch.optim.LBFGS(made.model.parameters()))
    made.run.steps(1)


def staged(act: Callable[[Setup, Any, Any], Any]) -> Callable[[Setup], None]:
    """With an optimizer whose update is computed in step.run()."""

    def body(made: Setup) -> None:
        other = TwoFactors(made.model.parameters())
        made.run.register(other=other)
        for step in made.run.steps(2):
            step.run(made.loss, max_norm=0.5)
            act(made, step, other)
            other.step()

    return body


def doubled(made: Setup, *_: Any) -> None:
    for each in made.model.parameters():
        assert each.grad is not None
        each.grad.mul_(2)


MISTAKES: dict[str, tuple[Callable[[Setup], Any], str]] = {
    "scaler": (scaled, "a GradScaler in a run with shard_size"),
    "several": (several, "LBFGS needs all parameters at once"),
    "clipped later": (staged(lambda made, step, _: step.clip_grad_norm_(0.5)), r"expected step.run.*max_norm=0.5"),
    "changed": (staged(doubled), "has changed gradients, from which TwoFactors"),
    "another rate": (staged(lambda made, step, other: other.param_groups[0].update(lr=1.0)), "changed the settings"),
    "norm": (
        stepping(lambda made, step: (step.run(made.loss), step.clip_grad_norm_(1.0, norm_type=1.0))),
        r"norm_type=1.0\) with shard_size: expected 2.0",
    ),
    "evaluation before": (
        lambda made: made.run.evaluate(DATA, made.loss, batch_size=2),
        "before the first loop of a run with shard_size",
    ),
    "evaluation between": (
        stepping(lambda made, step: (step.run(made.loss), made.run.evaluate(DATA, made.loss, batch_size=2))),
        "between step.run.. and the step of the optimizer 'optimizer'",
    ),
    "backward": (
        stepping(lambda made, step: step.run(lambda batch: made.loss(batch).backward())),
        "backward.. was called by the script",
    ),
    "backward outside": (
        stepping(lambda made, step: (step.run(made.loss), made.loss(DATA[:2]).backward())),
        "backward.. was called by the script|communicate outside of step.run",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_error(name: str, make: Make) -> None:
    act, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=message):
        act(make())


def test_an_evaluation_follows_a_step_that_is_left_out(make: Make) -> None:
    made, found = make(), []
    for step in made.run.steps(1):
        step.run(made.loss)
        made.optimizer.zero_grad()
        found.append(float(made.run.evaluate(DATA, made.loss, batch_size=3)))
    found.append(float(made.run.evaluate(DATA, made.loss, batch_size=3)))
    assert found[0] == found[1] > 0.0


def test_an_evaluation_of_a_loop_that_is_left_out_and_was_not_recorded_is_of_the_initial_models(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("unicron_lightning.checkpoints.agent_memory.StateMemory.is_past", lambda memory: True)
        made, whole = make(), make(tmp_path / "whole", shards=False)
        found = [float(each.run.evaluate(DATA, each.loss, batch_size=3)) for each in (made, whole) if not each.train(1)]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert caplog.text.count("evaluation_unknown") == 2
    assert made.train(2) == pytest.approx(whole.train(2), rel=1e-5), "the second loop trains"


def test_the_mesh_of_whole_models_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"expected Run\(..., shard_size=...\)"):
        make(shards=False).run.mesh  # noqa: B018
    with pytest.raises(ConfigError, match="shard_size=0: expected a whole number of at least 1"):
        Run(DATA, micro_batch_size=2, global_batch_size=8, shard_size=0)


def test_a_group_refuses_collectives_while_it_has_a_message() -> None:
    group = ShardGroup(0, 2)
    group.refusal = "not now"
    with pytest.raises(ConfigError, match="not now"):
        torch.distributed.all_reduce(torch.ones(1), group=group)
