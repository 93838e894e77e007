"""Muon, whose updates need whole matrices, with deaths before, in and after its updates."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from fsdp.judge import notes
from fsdp.preconditioned import PRECONDITIONED
from fsdp.test_training import check, die, run
from optimizers.table import HAS_PACKAGE, OF_PACKAGE, OPTIMIZERS, SAMPLES, Matrices, data
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from unicron_lightning import UnicronFSDPStrategy
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp import whole_updates
from unicron_lightning.fsdp.export import export_checkpoint
from unicron_lightning.fsdp.mesh import local_shards

if TYPE_CHECKING:
    from pathlib import Path

    from worlds.client import Worlds

MUON_POINTS = 64
"""Points of a step with an update of whole matrices, the last ones of which are those of the update and the commit."""
CHOSEN: list[dict[str, Any]] = [
    {"replicas": 2, "tied": False, "whole": "muon", "at": [[rank, point]]}
    for rank, point in ((0, "update"), (1, "update"), (2, 58), (3, 59), (0, 60), (1, 61), (2, "updated"), (3, "commit"))
]
TOGETHER: list[dict[str, Any]] = [
    {"replicas": 2, "tied": True, "whole": "muon", "at": [[0, 59], [3, 61]]},
    {"replicas": 3, "tied": False, "whole": "muon", "at": [[1, "updated"], [2, 58]]},
    {"replicas": 2, "tied": False, "whole": "muon", "at": [[1, 60], [2, "commit"]]},
]


class Both(torch.optim.Optimizer):
    """Updates matrices by their norms, and other parameters elementwise, in groups of one optimizer."""

    needs_whole_parameters = True

    def __init__(self, parameters: Any) -> None:
        found = [*parameters]
        groups = [{"params": [each for each in found if (each.dim() == 2) == by_muon]} for by_muon in (True, False)]
        groups[0]["lr"], groups[1]["lr"] = 0.02, 0.01  # type: ignore[assignment]
        super().__init__([each for each in groups if each["params"]], {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(each))
                state["step"] += 1
                state["mean"].lerp_(each.grad, 0.1)
                update = state["mean"]
                if each.dim() == 2:
                    update = update / (0.1 + torch.linalg.vector_norm(update))
                each.sub_(update, alpha=group["lr"] / (1 + 0.01 * state["step"]))
        self.end()
        return loss

    def end(self) -> None:
        """End a step."""


class Divided(Both):
    """Sums over the shards in its update."""

    needs_whole_parameters = False

    strategy: Any = None

    def end(self) -> None:
        self.strategy._sharded._group.allreduce([torch.zeros(1)]).wait()


class Counts(Both):
    """Counts its steps in the settings of its groups."""

    def end(self) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


class Totals(Both):
    """Computes a setting of its groups from the gradients of all parameters."""

    def end(self) -> None:
        norms = [float(each.grad.norm()) for group in self.param_groups for each in group["params"]]
        for group in self.param_groups:
            group["total"] = sum(norms)


class Biased(Matrices):
    """With a bias in each layer, of which the first one is trained by nothing but has gradients."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))

    def configure_optimizers(self) -> Any:
        return self._make([each for each in self.parameters() if each is not self.net[0].bias])


class Full(Matrices):
    """With gradients of full rank: the eigenvectors of others depend on rounding."""

    batch = 8

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        torch.manual_seed(2)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False))


def declared(name: str, parameters: Any) -> torch.optim.Optimizer:
    """An optimizer of a package."""
    optimizer: Any = OPTIMIZERS[name](parameters)
    optimizer.needs_whole_parameters = True
    return optimizer  # type: ignore[no-any-return]


class ClipsItself(Matrices):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Clip nothing."""


class ChangesGradients(Matrices):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for each in self.parameters():
            if each.grad is not None:
                each.grad.mul_(2)


def fit(module: Matrices, folder: Path, **options: Any) -> list[torch.Tensor]:
    """Train in this process alone; return the parameters."""
    pl.seed_everything(3, verbose=False)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "precision": "64-true",
        "max_epochs": 2,
        "logger": False,
    }
    settings |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(**settings, gradient_clip_val=0.1, default_root_dir=folder, **options)
    trainer.fit(module, DataLoader(data().dataset, batch_size=getattr(module, "batch", 2), sampler=range(SAMPLES)))
    return [each.detach() for each in local_shards(module.parameters())]


@pytest.mark.allow_leak("listening_sockets", reason="the group of a replica of one lives as long as the process")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning")
@pytest.mark.parametrize(
    ("module", "make"),
    [
        (Matrices, OPTIMIZERS["muon"]),
        (Biased, Both),
        (Biased, OPTIMIZERS["adamw-foreach"]),
        *((Biased, PRECONDITIONED[name]) for name in ("shampoo", "soap")),
        *((Full, partial(declared, name)) for name in OF_PACKAGE if HAS_PACKAGE),
    ],
)
def test_one_shard_is_lightnings_own(module: type[Matrices], make: Any, tmp_path: Path) -> None:
    """Also the norm to which gradients are clipped: that of the optimizer's parameters."""
    whole = fit(module(make, 0.0), tmp_path)
    own = fit(module(make, 0.0), tmp_path, strategy=UnicronFSDPStrategy(shard_size=1))
    for one, other in zip(own, whole, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.allow_leak("listening_sockets", reason="the group of a replica of one lives as long as the process")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning")
@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (ClipsItself, "muon", "configure_gradient_clipping with Muon"),
        (ChangesGradients, "muon", "has changed gradients, from which Muon"),
        (Matrices, "divided", "Divided lets the shards of parameters communicate in its update"),
    ],
)
def test_updates_after_the_commit_are_refused(module: type[Matrices], name: str, message: str, tmp_path: Path) -> None:
    """From gradients that have changed since, and with communication."""
    Divided.strategy = UnicronFSDPStrategy(shard_size=1)
    with pytest.raises(ConfigError, match=message):
        fit(module(OPTIMIZERS.get(name, Divided), 0.0), tmp_path, strategy=Divided.strategy)


@pytest.mark.allow_leak("listening_sockets", reason="the group of a replica of one lives as long as the process")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning")
def test_settings_that_depend_on_all_parameters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each parameter updated apart; settings that change equally are taken."""
    monkeypatch.setattr(whole_updates, "ROUND_BYTES", 1)
    module = Biased(Counts, 0.0)
    fit(module, tmp_path, strategy=UnicronFSDPStrategy(shard_size=1))
    optimizer: Any = module.optimizers(use_pl_optimizer=False)
    assert [group["steps"] for group in optimizer.param_groups] == [module.trainer.global_step] * 2
    with pytest.raises(ConfigError, match=r"Totals changes the settings \['total'\] of a group differently"):
        fit(Biased(Totals, 0.0), tmp_path, strategy=UnicronFSDPStrategy(shard_size=1))


def test_deaths_in_an_update(worlds: Worlds, tmp_path: Path) -> None:
    """Each worker in some part of it, and two at once; parameters are those of one process."""
    others = [{**each, "whole": kind, "own": kind == "soap"} for kind in PRECONDITIONED for each in TOGETHER]
    worlds.run("deaths:histories", 1, tmp_path, chosen=[*CHOSEN, *TOGETHER, *others], seeds=[])


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("shards", "slices", "optimizer"),
    [
        (2, 1, {"muon": True}),
        pytest.param(1, 2, {"muon": True}, marks=pytest.mark.chaos),
        (2, 1, {"preconditioner": "soap", "own": "whole", "memory": [3, 1]}),
        pytest.param(1, 2, {"preconditioner": "shampoo", "own": "whole"}, marks=pytest.mark.chaos),
    ],
)
def test_kills_heal(tmp_path: Path, shards: int, slices: int, optimizer: dict[str, Any]) -> None:
    schedule = [die("update", 0, 1), die("optimizer", 1, 0), die("updated", 1, 1), die("commit", 0, 0)]
    settings = {"steps": 12, "full": 4, "tied": False, "save_every": 5, **optimizer}
    settings |= {"shards": shards, "slices": slices, "options": {"digest_every": 1}}
    run(tmp_path, settings, schedule, 5, "2:4")
    assert [note["point"] for note in notes(tmp_path, "fault")] == [fault["point"] for fault in schedule]
    check(tmp_path, settings, 4)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["shampoo", pytest.param("soap", marks=pytest.mark.chaos)])
def test_states_of_another_shape_resume_with_another_number_of_shards(tmp_path: Path, name: str) -> None:
    """From a file of two shards to folders of two lanes of one, and back."""
    settings = {"full": 2, "preconditioner": name, "own": "whole", "tied": False, "save_every": 2}
    halves: list[dict[str, Any]] = [
        {"steps": 2, "shards": 2, "replicas": 1},
        {"steps": 4, "shards": 1, "replicas": 2, "options": {"save_distributed_checkpoint": True}},
        {"steps": 6, "shards": 2, "replicas": 1, "options": {"save_distributed_checkpoint": True}},
    ]
    resume = None
    for number, half in enumerate(halves):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        run(folder, {**settings, **half, "resume": resume}, [], 2, "2:2")
        resume = str(folder / "checkpoints" / f"step={half['steps']}.ckpt")
    reference = check(tmp_path / "2", {**settings, **halves[2]}, 2)
    assert reference["step"] == 6
    export_checkpoint(str(resume), tmp_path / "whole.ckpt")
    own, expected = (
        torch.load(path, weights_only=True)["optimizer_states"][0]
        for path in (tmp_path / "whole.ckpt", tmp_path / "2" / "alone" / "checkpoints" / "step=6.ckpt")
    )
    assert {**own["param_groups"][0], "params": 0} == {**expected["param_groups"][0], "params": 0}
    states = {number: state for number, state in expected["state"].items() if state}  # folders have no empty ones
    compared = tree_map(partial(torch.testing.assert_close, rtol=0, atol=1e-9), own["state"], states)
    assert len(compared) == len(states) > 0
