"""Names in a checkpoint's folder and its index, without torch's package of checkpoints, which takes long to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from unicron_lightning.worker.checkpoint_files import INDEX, REST

MODEL: Final = "state_dict"
OPTIMIZER: Final = "optimizer_"
"""Followed by the number of the optimizer."""


def is_folder(path: str | Path) -> bool:
    """Whether a checkpoint is a folder, or objects under a URL, in this format."""
    if "://" in str(path):
        import fsspec  # type: ignore[import-untyped]  # for URLs only

        files, root = fsspec.core.url_to_fs(str(path))
        return all(files.isfile(f"{root}/{name}") for name in (INDEX, REST))
    return (Path(path) / INDEX).is_file() and (Path(path) / REST).is_file()


def by_name(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an optimizer's state by parameters' names, from its `state_dict`.

    Args:
        state: by numbers.
        names: of the parameters of each group.
    """
    flat = [name for group in names for name in group]
    groups = [{**group, "params": list(own)} for group, own in zip(state["param_groups"], names, strict=True)]
    return {"state": {flat[number]: values for number, values in state["state"].items()}, "param_groups": groups}


def by_number(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an optimizer's state as its `state_dict` has it, from one by names: the inverse of `by_name`.

    Args:
        state: by names.
        names: of the parameters of each group, in the optimizer's order.
    """
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    groups = [
        {**group, "params": [numbers[name] for name in own]}
        for group, own in zip(state["param_groups"], names, strict=True)
    ]
    entries = {numbers[name]: values for name, values in state.get("state", {}).items()}
    return {"state": entries, "param_groups": groups}
