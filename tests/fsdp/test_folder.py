"""Folders with a file for each shard: read by any number of shards, by plain FSDP2, by torch, and as a whole."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
from fsdp.folders import REST, Net, alone, fresh, groups_of, mesh_of, same, whole_run
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from unicron_lightning.checkpoints.files import REST as REST_FILE
from unicron_lightning.checkpoints.files import is_folder
from unicron_lightning.checkpoints.index import read_rest
from unicron_lightning.cli.commands import _run
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp import folder
from unicron_lightning.fsdp.export import checkpoint_digests, export_checkpoint
from unicron_lightning.worker import codec
from unicron_lightning.worker.reproducible import digest_of

if TYPE_CHECKING:
    from worlds.client import Worlds


@pytest.mark.filterwarnings("ignore:.*to load in a single process")
def test_any_number_of_shards_plain_fsdp_and_one_process_read_a_folder(worlds: Worlds, tmp_path: Path) -> None:
    path, expected = tmp_path / "by2", Net()
    worlds.run("folders:exchange", 3, tmp_path)
    optimizer = whole_run(expected)
    net = Net()
    dcp.load({"state_dict": net.state_dict()}, checkpoint_id=path, no_dist=True)
    assert same(net.state_dict(), expected.state_dict())
    assert export_checkpoint(path, tmp_path / "one.ckpt") == len(expected.state_dict())
    content = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert same(content["state_dict"], expected.state_dict())
    assert {name: content[name] for name in REST} == REST
    [state] = content["optimizer_states"]
    assert state["param_groups"] == optimizer.state_dict()["param_groups"]
    assert all(same(state["state"][number], values) for number, values in optimizer.state_dict()["state"].items())
    torch.optim.AdamW([{"params": group} for group in groups_of(Net())]).load_state_dict(state)
    export_checkpoint(tmp_path / "by3", tmp_path / "three.safetensors")
    assert same(load_file(tmp_path / "three.safetensors"), expected.state_dict())


def test_a_folder_replaces_another_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_text("old")
    for _ in range(2):
        alone(path)
    assert is_folder(path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_safetensors_of_a_file(tmp_path: Path) -> None:
    expected = Net()
    torch.save({"state_dict": expected.state_dict(), **REST}, tmp_path / "one.ckpt")
    export_checkpoint(tmp_path / "one.ckpt", tmp_path / "one.safetensors")
    assert same(load_file(tmp_path / "one.safetensors"), expected.state_dict())
    modes = {(tmp_path / f"one.{kind}").stat().st_mode for kind in ("ckpt", "safetensors")}
    assert len(modes) == 1, "that of the user's umask"


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    alone(tmp_path / "a")
    net, optimizer = fresh(mesh_of(0, 1))
    net.more = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"no tensor more\.weight; expected one of shape \(2, 2\)"):
        folder.load_module(tmp_path / "a", net)
    other = nn.Module()
    other.inner = fully_shard(nn.Linear(4, 6), mesh=mesh_of(0, 1))
    with pytest.raises(ConfigError, match=r"a tensor of shape \(5, 4\) inner\.weight; expected one of shape \(6, 4\)"):
        folder.load_module(tmp_path / "a", other)
    optimizer = torch.optim.AdamW(net.inner.parameters())
    with pytest.raises(ConfigError, match="other groups of the optimizer's parameters"):
        folder.load_optimizer_part(folder.read_optimizer_part(tmp_path / "a", net), net, optimizer)


def test_states_have_the_types_of_parameters_that_are_converted(tmp_path: Path) -> None:
    """Divided or not; scalars keep theirs."""
    alone(tmp_path / "a")
    net = Net().double()
    fully_shard(net.inner, mesh=mesh_of(0, 1))
    optimizer = torch.optim.AdamW([{"params": group} for group in groups_of(net)])
    folder.load_optimizer_part(folder.read_optimizer_part(tmp_path / "a", net), net, optimizer)
    assert any(isinstance(each, DTensor) for each in optimizer.state) and len(optimizer.state) > 2
    for state in optimizer.state.values():
        assert {name: value.dtype for name, value in state.items()} == {
            "step": torch.float32,
            "exp_avg": torch.float64,
            "exp_avg_sq": torch.float64,
        }


@pytest.mark.parametrize(("output", "reason"), [("x.bin", "expected a name that ends with"), ("a.ckpt", "exists")])
def test_an_export_to_another_name_is_refused(tmp_path: Path, output: str, reason: str) -> None:
    (tmp_path / "a.ckpt").touch()
    with pytest.raises(ConfigError, match=reason):
        export_checkpoint(tmp_path / "a.ckpt", tmp_path / output)


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_counts_of_steps_become_counts_of_batches(tmp_path: Path) -> None:
    current, total = ({"ready": n, "started": n, "processed": n, "completed": n - 1} for n in (5, 9))
    progress = {"current": current, "total": total}
    loops = {"fit_loop": {"epoch_loop.batch_progress": progress}}
    torch.save({"state_dict": {}, "loops": loops, "unicron_logged": b"x"}, tmp_path / "steps.ckpt")
    export_checkpoint(tmp_path / "steps.ckpt", tmp_path / "batches.ckpt", batches=3)
    content = torch.load(tmp_path / "batches.ckpt", weights_only=True)
    counts = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    current, total = ({"ready": n, "started": n, "processed": n, "completed": n - 1} for n in (15, 27))
    assert counts == {"current": current, "total": total}
    assert "unicron_logged" not in content
    with pytest.raises(ConfigError, match="accumulate_grad_batches=0: expected 1 or more"):
        export_checkpoint(tmp_path / "steps.ckpt", tmp_path / "more.ckpt", batches=0)


def test_checkpoints_at_urls_are_exported(tmp_path: Path) -> None:
    alone(tmp_path / "folder")
    export_checkpoint(tmp_path / "folder", tmp_path / "whole.ckpt")
    store = fsspec.filesystem("memory")
    try:
        for name in ("folder", "whole.ckpt"):
            store.put(str(tmp_path / name), f"/exported/{name}", recursive=True)
            count = export_checkpoint(f"memory://exported/{name}", tmp_path / f"{name}.safetensors")
            assert count == len(load_file(tmp_path / f"{name}.safetensors"))
    finally:
        store.store.clear()
    one, other = (load_file(tmp_path / f"{name}.safetensors") for name in ("folder", "whole.ckpt"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    for url, reason in (("memory://nothing/x.ckpt", "cannot be read"), ("nostore://x/y.ckpt", "nostore")):
        with pytest.raises(ConfigError, match=reason):
            export_checkpoint(url, tmp_path / "x.ckpt")


def test_nothing_in_a_changed_checkpoint_is_run(tmp_path: Path) -> None:
    path, trap = tmp_path / "checkpoint", Trap(tmp_path / "run")
    alone(path)
    net, _ = fresh(mesh_of(0, 1))
    rest, index = (path / REST_FILE).read_bytes(), (path / ".metadata").read_bytes()
    torch.save(trap, path / REST_FILE)
    with pytest.raises(ConfigError, match=r"meta\.pt' cannot be read as plain data"):
        export_checkpoint(path, tmp_path / "x.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        read_rest(path)
    (path / REST_FILE).write_bytes(rest)
    (path / ".metadata").write_bytes(pickle.dumps(trap))
    for read in (
        lambda: folder.load_module(path, net),
        lambda: folder.read_optimizer_part(path, net),
        lambda: export_checkpoint(path, tmp_path / "x.safetensors"),
    ):
        with pytest.raises(ConfigError, match="is no index of a checkpoint"):
            read()
    (path / ".metadata").write_bytes(index)
    torch.save(trap, tmp_path / "one.ckpt")
    with pytest.raises(ConfigError, match=r"one\.ckpt' cannot be read as plain data"):
        export_checkpoint(tmp_path / "one.ckpt", tmp_path / "x.safetensors")
    assert not trap.path.exists()


def test_digests_are_those_of_the_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone(tmp_path / "folder")
    export_checkpoint(tmp_path / "folder", tmp_path / "whole.ckpt")
    parameters, optimizers = checkpoint_digests(tmp_path / "whole.ckpt")
    assert checkpoint_digests(tmp_path / "folder") == (parameters, optimizers)
    loops = {"optimizers": {"one": {"state": {}}}, "others": {}}
    torch.save({"net": {"weight": torch.ones(2)}, "unicron_loop": codec.encode(loops)}, tmp_path / "loop.ckpt")
    assert _run(["export", "--digest", str(tmp_path / "whole.ckpt")]) == 0
    assert capsys.readouterr().out == f"digest {parameters} of the parameters, {optimizers} of the optimizers\n"
    assert checkpoint_digests(tmp_path / "loop.ckpt")[0] == digest_of({"net": {"weight": torch.ones(2)}})
    torch.save({"other": 1}, tmp_path / "none.ckpt")
    with pytest.raises(ConfigError, match="is no checkpoint: it has no state_dict"):
        checkpoint_digests(tmp_path / "none.ckpt")
