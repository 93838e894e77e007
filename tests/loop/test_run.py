"""The loop in one process: its settings, the script's mistakes, checkpoints, and what it imports."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from unicron_lightning import Run
from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.state_parts import DividedState

DATA = TensorDataset(torch.arange(40.0).reshape(20, 2) / 40, torch.arange(20.0).reshape(20, 1) / 20)
ROOT = Path(__file__).parents[2]


class Setup:
    """A small model, registered."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(1)
        given = {"micro_batch_size": 2, "global_batch_size": 8, "seed": 1, "checkpoints": folder, **options}
        self.run = Run(DATA, **given)
        self.model = nn.Linear(2, 1).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.run.register(model=self.model, optimizer=self.optimizer)

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch."""
        return nn.functional.mse_loss(self.model(batch[0].double()), batch[1].double())

    def train(self, steps: int, act: Callable[[Any], None] = lambda step: None) -> list[float]:
        """Train; return the losses."""
        losses = []
        for step in self.run.steps(steps):
            losses.append(float(step.run(self.loss)))
            self.optimizer.step()
            act(step)
        return losses


@pytest.fixture
def made(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def test_all_members_send_a_joiner_models_and_optimizers(made: Setup) -> None:
    made.train(1)
    found = DividedState.of(made.run._state(), least=1, paths=("",))
    models = sum(parameter.nbytes for parameter in made.model.parameters())
    assert sum(tensor.nbytes for tensor, equal in zip(found.large, found.equal, strict=True) if equal) == 2 * models
    assert not all(found.equal)  # random state


def test_means_have_the_form_of_what_the_function_returns(made: Setup) -> None:
    named = made.run.evaluate(DATA, lambda batch: {"value": made.loss(batch)}, batch_size=3)
    assert list(named) == ["value"]
    assert torch.equal(named["value"], made.run.evaluate(DATA, made.loss, batch_size=3))


def test_the_gradient_is_that_of_the_mean_loss(made: Setup) -> None:
    for step in made.run.steps(1):
        loss = step.run(made.loss)
        found = [each.grad.clone() for each in made.model.parameters()]
        order = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:8]
        batch = DATA[order]
        expected = torch.autograd.grad(made.loss(batch), [*made.model.parameters()])
        assert float(loss) == pytest.approx(made.loss(batch).item(), rel=1e-12)
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-12)
        norm = step.clip_grad_norm_(1e-3)
        assert float(norm) == pytest.approx(float(torch.cat([each.flatten() for each in expected]).norm()), rel=1e-9)


def test_lbfgs_evaluates_a_step_several_times(made: Setup) -> None:
    """Its closure runs the step's micro-batches again."""
    other = nn.Linear(2, 1).double()
    other.load_state_dict(made.model.state_dict())
    options = {"lr": 0.5, "max_iter": 5, "history_size": 3}
    newton, expected = (
        torch.optim.LBFGS(made.model.parameters(), **options),
        torch.optim.LBFGS(other.parameters(), **options),
    )
    made.run.register(newton=newton)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    for step in made.run.steps(2):
        newton.step(lambda step=step: step.run(made.loss))
        x, y = DATA[order[8 * step.number - 8 : 8 * step.number]]

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            expected.zero_grad()
            loss = nn.functional.mse_loss(other(x.double()), y.double())
            loss.backward()
            return loss

        expected.step(closure)
        for one, each in zip(made.model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(one, each, rtol=1e-10, atol=1e-12)
    assert newton.state[made.model.weight]["func_evals"] > 4


def test_each_sample_is_used_once_in_an_epoch_and_the_last_step_is_shorter(made: Setup) -> None:
    seen: dict[int, list[float]] = {0: [], 1: []}
    numbers = []
    for step in made.run.steps(max_epochs=2):

        def loss(batch: Any, epoch: int = step.epoch) -> torch.Tensor:
            seen[epoch] += batch[1].flatten().tolist()
            return made.loss(batch)

        step.run(loss)
        numbers.append((step.number, step.epoch, step.ends_epoch))
    assert numbers == [(1, 0, False), (2, 0, False), (3, 0, True), (4, 1, False), (5, 1, False), (6, 1, True)]
    assert all(sorted(each) == DATA.tensors[1].flatten().tolist() for each in seen.values())
    assert seen[0] != seen[1]


def test_a_checkpoint_continues_the_training_bit_by_bit(tmp_path: Path) -> None:
    paths: list[str] = []
    whole = Setup(tmp_path)
    losses = whole.train(6, lambda step: paths.append(whole.run.save()) if step.number == 2 else None)
    assert paths == [str(tmp_path / "step=2.ckpt")]
    assert [*torch.load(paths[0], weights_only=True)] == ["model", "unicron_loop"]
    again = Setup(tmp_path / "again", seed=7)
    again.run.load(paths[0])
    assert again.train(6) == losses[2:]
    for one, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("beside", [False, True])
def test_old_checkpoints_are_removed(beside: bool, tmp_path: Path) -> None:
    """Not those with a path of their own; after a resumption those that were there before, too."""
    options: dict[str, Any] = {"keep": 2, "beside": beside}
    whole, mine = Setup(tmp_path, **options), tmp_path / "mine" / "own.ckpt"
    losses = whole.train(6, lambda step: whole.run.save(mine if step.number == 3 else None))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "step=5.ckpt", "step=6.ckpt"]
    assert mine.is_dir() == beside
    again = Setup(tmp_path, **options)
    again.run.load(tmp_path / "step=5.ckpt")
    assert again.train(8, lambda step: again.run.save())[:1] == losses[5:]
    again.run.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "step=7.ckpt", "step=8.ckpt"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_folder_continues_the_training_bit_by_bit(tmp_path: Path) -> None:
    """With two models, whose parameters torch reads, too."""

    def made(folder: Path) -> tuple[Setup, nn.Module, Any]:
        found, other = Setup(folder, beside=True), nn.BatchNorm1d(1).double()
        second = torch.optim.AdamW(other.parameters())
        found.run.register(other=other, second=second, schedule=torch.optim.lr_scheduler.StepLR(second, 1))
        return found, other, second

    def train(one: tuple[Setup, nn.Module, Any], steps: int, saved: int) -> list[float]:
        losses, (found, other, second) = list[float](), one
        for step in found.run.steps(steps):
            losses.append(float(step.run(lambda batch: found.loss(batch) * other(batch[1].double()).square().mean())))
            found.optimizer.step()
            second.step()
            found.run.registered.others["schedule"].step()
            if step.number == saved:
                found.run.save()
        return losses

    whole, again = made(tmp_path), made(tmp_path / "again")
    losses = train(whole, 6, 3)
    again[0].run.load(tmp_path / "step=3.ckpt")
    assert train(again, 6, 0) == losses[3:]
    for one, other in zip(again[1].state_dict().values(), whole[1].state_dict().values(), strict=True):
        assert torch.equal(one, other)
    read = {"state_dict": {"model.weight": torch.zeros(1, 2).double()}}
    torch.distributed.checkpoint.load(read, checkpoint_id=tmp_path / "step=3.ckpt", no_dist=True)
    assert read["state_dict"]["model.weight"].all()


def test_a_schedule_of_the_global_batch(tmp_path: Path) -> None:
    made = Setup(tmp_path, global_batch_size={0: 4, 1: 10})
    sizes = []
    for step in made.run.steps(max_epochs=2):
        counted = [0]

        def loss(batch: Any, counted: list[int] = counted) -> torch.Tensor:
            counted[0] += len(batch[0])
            return made.loss(batch)

        step.run(loss)
        sizes.append(counted[0])
    assert sizes == [4, 4, 4, 4, 4, 10, 10]


def test_two_optimizers_with_two_runs_in_a_step(tmp_path: Path) -> None:
    made, other = Setup(tmp_path), nn.Linear(1, 1).double()
    second = torch.optim.Adam(other.parameters())
    made.run.register(other=other, second=second)
    for step in made.run.steps(3):
        step.run(made.loss)
        assert other.weight.grad is None
        made.optimizer.step()
        found = step.run(lambda batch: {"loss": other(batch[1].double()).square().mean(), "one": 1})
        assert float(found["one"]) == 1.0 and float(found["loss"]) > 0.0
        assert made.model.weight.grad is None and other.weight.grad is not None
        second.step()


def test_a_scaler_does_not_change_the_gradients(tmp_path: Path) -> None:
    plain, scaled = Setup(tmp_path), Setup(tmp_path)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled.run.register(scaler=scaler)
    plain.train(3)
    for step in scaled.run.steps(3):
        step.run(scaled.loss)
        step.clip_grad_norm_(1e9)
        scaler.step(scaled.optimizer)
        scaler.update()
    for one, other in zip(plain.model.parameters(), scaled.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12)


def test_an_evaluation_is_the_mean_over_the_samples_and_changes_nothing(made: Setup) -> None:
    made.model.train()
    found = made.run.evaluate(DATA, made.loss, batch_size=3)
    assert float(found) == pytest.approx(made.loss(DATA[:]).item(), rel=1e-12)
    assert made.model.training


def test_wrong_arguments_of_a_pass_do_not_end_the_run(made: Setup) -> None:
    for step in made.run.steps(2):
        for act in (made.run.evaluate, made.run.predict):
            with pytest.raises(ConfigError, match="batch size"):
                act(DATA, made.loss, batch_size=0)
        step.run(made.loss)
    assert made.run.global_step == 2


def test_a_prediction_has_each_sample_once_in_order(made: Setup) -> None:
    made.model.train()
    found = made.run.predict(DATA, lambda batch: (batch[1], made.model(batch[0].double())), batch_size=3)
    assert [index for indices, _ in found for index in indices or ()] == list(range(20))
    assert torch.equal(torch.cat([targets for _, (targets, _) in found]), DATA.tensors[1])
    assert not any(output.requires_grad for _, (_, output) in found) and made.model.training
    assert [indices for indices, _ in made.run.predict(Stream(), len, batch_size=10)] == [None, None]


def test_leaving_the_loop_early_is_harmless(made: Setup) -> None:
    for step in made.run.steps(5):
        step.run(made.loss)
        if step.number == 2:
            break
    assert made.run.global_step == 1  # the body of the second step has not ended
    assert len(made.train(3)) == 2


def test_should_stop_ends_the_loop_after_the_body(made: Setup) -> None:
    def stop(step: Any) -> None:
        made.run.should_stop = step.number == 3

    assert len(made.train(9, stop)) == 3
    assert made.run.global_step == 3


def test_a_forgotten_zero_grad_is_harmless(tmp_path: Path) -> None:
    one, other = Setup(tmp_path), Setup(tmp_path)
    assert one.train(4) == other.train(4, lambda step: other.optimizer.zero_grad())


def wrong(act: Callable[[Setup, Any], Any]) -> Callable[[Setup], Any]:
    def body(made: Setup) -> None:
        for step in made.run.steps(3):
            act(made, step)

    return body


MISTAKES: dict[str, tuple[Callable[[Setup], Any], str]] = {
    "no limit": (lambda made: made.run.steps(), "no limit"),
    "limit": (lambda made: made.run.steps(-1), "max_steps=-1: expected a whole number"),
    "register again": (lambda made: made.run.register(model=nn.Linear(1, 1)), "the name 'model' is taken"),
    "register nothing": (lambda made: made.run.register(x=object()), r"register\(x=object\): expected a module"),
    "register ddp": (lambda made: made.run.register(x=nn.DataParallel(nn.Linear(1, 1))), "without its wrapper"),
    "register late": (wrong(lambda made, step: made.run.register(x=nn.Linear(1, 1))), "after the first step"),
    "save early": (lambda made: made.run.save(), "before the first loop"),
    "nested": (wrong(lambda made, step: made.run.steps(2)), "within the loop of another"),
    "no loss": (wrong(lambda made, step: step.run(lambda batch: None)), "returned None; expected a loss"),
    "no scalar": (wrong(lambda made, step: step.run(lambda batch: made.model(batch[0].double()))), r"shape \(2, 1\)"),
    "value": (wrong(lambda made, step: step.run(lambda b: {"loss": made.loss(b), "x": "y"})), "x=...: found 'y'"),
    "backward": (
        wrong(lambda made, step: step.run(lambda batch: made.loss(batch).backward())),
        "backward.. was called by the script",
    ),
    "backward outside": (
        wrong(lambda made, step: (step.run(made.loss), made.loss(DATA[:2]).backward())),
        "backward.. was called by the script",
    ),
    "clip early": (wrong(lambda made, step: step.clip_grad_norm_(1.0)), "no gradients before step.run"),
    "log": (wrong(lambda made, step: step.log(x="y")), "expected a number"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_error(name: str, made: Setup) -> None:
    act, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=message):
        act(made)


def test_an_exception_ends_the_run(made: Setup) -> None:
    def fails(batch: Any) -> Any:
        raise KeyError("mine")

    for step in made.run.steps(3):
        with pytest.raises(KeyError):
            step.run(fails)
        with pytest.raises(ConfigError, match="has ended with KeyError"):
            step.run(made.loss)
        break


def test_a_step_that_is_over(made: Setup) -> None:
    steps: list[Any] = []
    made.train(1, steps.append)
    with pytest.raises(ConfigError, match=r"step.run\(\) of step 1, which is over"):
        steps[0].run(made.loss)


class Stream(IterableDataset[Any]):
    """`DATA` in streams, in an order of the epoch; one stream is longer."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch))
        part = order.tolist() if world == 1 else order[[slice(13), slice(13, None)][rank]].tolist()
        return (DATA[number] for number in part)


STREAMS = {"streams": 2, "global_batch_size": 8, "micro_batch_size": 2}


class Streamed(Setup):
    """A training over streams."""

    def __init__(self, folder: Path, data: Any = None, **options: Any) -> None:
        torch.manual_seed(1)
        self.run = Run(Stream() if data is None else data, seed=1, checkpoints=folder, **STREAMS, **options)
        self.model = nn.Linear(2, 1).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.run.register(model=self.model, optimizer=self.optimizer)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("runs", [True, False])
def test_each_sample_of_streams_is_used_once_in_an_epoch(runs: bool, workers: int, tmp_path: Path) -> None:
    """Also if bodies do not call `run`, whose commit otherwise makes the ends of streams known."""
    made = Streamed(tmp_path, DataLoader(Stream(), batch_size=2, num_workers=workers) if workers else None)
    seen: dict[int, list[float]] = {0: [], 1: []}
    numbers = []

    def loss(batch: Any) -> torch.Tensor:
        seen[made.run.current_epoch] += batch[1].flatten().tolist()
        batch[1].zero_()  # the next call gets samples of its own
        return made.loss(batch)

    for step in made.run.steps(max_epochs=2):
        if runs:
            step.run(loss)
            step.run(loss)
        numbers.append((step.number, step.epoch, step.ends_epoch))
    assert numbers == [(n + 1, n // 4, n % 4 == 3) for n in range(8)]
    if runs:
        assert all(sorted(each) == sorted(DATA.tensors[1].flatten().tolist() * 2) for each in seen.values())
        assert seen[0] != seen[1]


def test_a_checkpoint_continues_in_the_middle_of_streams(tmp_path: Path) -> None:
    paths: list[str] = []
    whole = Streamed(tmp_path)
    losses = whole.train(10, lambda step: paths.append(whole.run.save()) if step.number == 6 else None)
    again = Streamed(tmp_path / "again")
    again.run.load(paths[0])
    assert again.train(10) == losses[6:]


def test_an_evaluation_of_streams_is_the_mean_over_the_samples(tmp_path: Path) -> None:
    made = Streamed(tmp_path)
    found = made.run.evaluate(Stream(), made.loss, batch_size=3)
    assert float(found) == pytest.approx(made.loss(DATA[:]).item(), rel=1e-12)


def test_batches_of_another_iterable(tmp_path: Path) -> None:
    class Batches:
        def __iter__(self) -> Any:
            return iter([DATA[:2], DATA[2:4], DATA[4:6]])

    made = Setup(tmp_path)
    made.run = Run(Batches(), micro_batch_size=2, global_batch_size=4, seed=1, checkpoints=tmp_path)
    made.run.register(model=made.model, optimizer=made.optimizer)
    ends = []
    made.train(4, lambda step: ends.append(step.ends_epoch))
    assert ends == [False, True, False, True]


def test_streams_without_a_sample(tmp_path: Path) -> None:
    class Empty(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([])

    with pytest.raises(ConfigError, match="the data has no step in epoch 0: it is empty"):
        Streamed(tmp_path, Empty()).train(1)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (DATA, {"global_batch_size": 9, "micro_batch_size": 2}, "9 is no multiple of micro_batch_size=2; .* as 10"),
        (DATA, {"global_batch_size": "8", "micro_batch_size": 2}, "global_batch_size='8': expected a whole number"),
        (DATA, {"global_batch_size": {1: 8}, "micro_batch_size": 2}, "expected a size from epoch 0 on"),
        (DATA, {"global_batch_size": 8}, "without a batch size"),
        (DataLoader(DATA, 2), {"global_batch_size": 8, "micro_batch_size": 4}, r"DataLoader\(batch_size=2\)"),
        (iter([1]), {"global_batch_size": 8, "micro_batch_size": 4}, "an iterator that can be read once"),
        (Stream(), {**STREAMS, "global_batch_size": 6}, "6 is no multiple of micro_batch_size=2 x streams=2; .* as 8"),
        (Stream(), {**STREAMS, "streams": 0}, "streams=0: expected a whole number of at least 1"),
        (
            DATA,
            {"global_batch_size": 8, "micro_batch_size": 4, "keep": 0},
            "keep=0: expected a whole number of at least 1",
        ),
        (DATA, {"global_batch_size": 8, "micro_batch_size": 4, "seed": 1.5}, "seed=1.5"),
        (DATA, {"global_batch_size": 8, "micro_batch_size": 4, "checkpoints": "s3://x"}, "s3://x"),
    ],
)
def test_settings_are_refused_with_their_values(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Run(data, **options)


def test_without_unicrons_torchrun_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun --rdzv-backend unicron"):
        Run(DATA, micro_batch_size=2, global_batch_size=8)


def test_what_is_registered_must_be_complete(tmp_path: Path) -> None:
    run = Run(DATA, micro_batch_size=2, global_batch_size=8, checkpoints=tmp_path)
    run.register(model=nn.Linear(2, 1))
    with pytest.raises(ConfigError, match="expected at least one of each"):
        run.steps(1)
    run.register(optimizer=torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=1.0))
    with pytest.raises(ConfigError, match=r"a parameter of shape \(1, 3\) that no registered module has"):
        run.steps(1)


def code_of(example: str) -> list[str]:
    """Return the lines of an example after its docstring."""
    return (ROOT / "examples" / f"{example}.py").read_text().split('"""', 2)[2].splitlines()


@pytest.mark.parametrize("example", ["loop_gpt", "loop_gan"])
def test_an_example_differs_in_at_most_ten_lines_from_the_script_before(example: str) -> None:
    lines = [*difflib.unified_diff(code_of(f"{example}_before"), code_of(example), n=1, lineterm="")][2:]
    added, removed = (sum(len(line) > 1 and line[0] == sign for line in lines) for sign in "+-")
    assert 5 <= max(added, removed) <= 10
    shown = "".join("@@\n" if line.startswith("@@") else f"{line.rstrip()}\n" for line in lines)
    assert f"```diff\n{shown}```\n" in (ROOT / "docs" / "loop.md").read_text(), f"expected in docs/loop.md:\n{shown}"
