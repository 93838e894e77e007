"""One file with whole tensors from a checkpoint of ``unicron_fsdp``, for programs without FSDP2 or Lightning."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from unicron_lightning.checkpoints.files import REST, is_folder
from unicron_lightning.checkpoints.index import read_checkpoint
from unicron_lightning.errors import ConfigError
from unicron_lightning.private_files import open_stored
from unicron_lightning.worker import codec
from unicron_lightning.worker.reproducible import digest_of

SAFETENSORS: Final = ".safetensors"
OWN: Final = ("unicron_logged", "unicron_state")
"""Keys of a checkpoint that this package's strategies add; see `strategies.state.join_state`."""
OF_LOOPS: Final = "unicron_loop"
"""Key of a file of `Run.save`; see `loop.registered`."""
FILES: Final = (".ckpt", ".pt", ".pth")


def export_checkpoint(checkpoint: str | Path, output: Path, *, batches: int = 1) -> int:
    """Write a checkpoint's content to one file; in one process, which holds it in memory.

    Args:
        checkpoint: a file of Lightning's, or a folder of `torch.distributed.checkpoint` with ``meta.pt``; its path, or
            a URL for which fsspec has a package.
        output: ``*.safetensors``: the module's parameters and buffers. ``*.ckpt``, ``*.pt``, ``*.pth``: everything, as
            Lightning's file for one process.
        batches: of a device, in a step of the trainer that is to resume the file (its ``accumulate_grad_batches``).

    Returns:
        Number of the module's tensors.

    Raises:
        ConfigError: the checkpoint cannot be read, ``output`` exists or has another suffix, safetensors is missing, or
            ``batches`` is below 1.
    """
    if output.suffix not in (SAFETENSORS, *FILES):
        raise ConfigError(f"{str(output)!r}: expected a name that ends with {SAFETENSORS}, {', '.join(FILES)}")
    if batches < 1:
        raise ConfigError(f"accumulate_grad_batches={batches}: expected 1 or more")
    if output.exists():
        raise ConfigError(f"{str(output)!r} exists; expected a new file")
    is_model = output.suffix == SAFETENSORS
    write = _safetensors_writer() if is_model else torch.save
    content = _folder(checkpoint, model_only=is_model) if _is_divided(checkpoint) else _file(checkpoint)
    state: dict[str, Any] = content["state_dict"]
    if batches > 1:
        _count_batches(content, batches)
    unfinished = output.with_name(f"{output.name}.{uuid.uuid4().hex[:8]}.unfinished")
    try:
        unfinished.touch()
        mode = unfinished.stat().st_mode  # by the user's umask; safetensors' own files are of mode 0600
        write(_apart(state) if is_model else content, unfinished)
        unfinished.chmod(mode)
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
    return sum(isinstance(each, Tensor) for each in state.values())


def checkpoint_digests(checkpoint: str | Path) -> tuple[str, str]:
    """Return the digests of the parameters of a checkpoint, as a reproducible run prints it, and of its optimizers.

    Args:
        checkpoint: as of `export_checkpoint`, or a file of `Run.save`.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    if _is_divided(checkpoint):
        content = _folder(checkpoint, model_only=False)
    else:
        content = _plain(checkpoint, _loaded, checkpoint)
    if OF_LOOPS in content:
        rest = codec.decode(content.pop(OF_LOOPS))
        return digest_of(content), digest_of([rest["optimizers"], rest["others"]])
    if "state_dict" not in content:
        raise ConfigError(f"{str(checkpoint)!r} is no checkpoint: it has no state_dict")
    rest = [content.get(name, []) for name in ("optimizer_states", "lr_schedulers")]
    return digest_of(content["state_dict"]), digest_of(rest)


def _is_divided(path: str | Path) -> bool:
    """Whether a path or URL is that of a folder.

    Raises:
        ConfigError: a URL cannot be read, e.g. as its package is missing.
    """
    if "://" not in str(path):
        return Path(path).is_dir()
    try:
        return is_folder(path)
    except Exception as error:  # noqa: BLE001 - a storage's package raises errors of its own
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None


def _folder(path: str | Path, *, model_only: bool) -> dict[str, Any]:
    if not is_folder(path):
        raise ConfigError(f"{str(path)!r} is no checkpoint: expected a file, or a folder with .metadata and meta.pt")
    return _plain(f"{path}/{REST}", partial(read_checkpoint, model_only=model_only), path)


def _file(path: str | Path) -> dict[str, Any]:
    content = _plain(path, _loaded, path)
    if "state_dict" not in content:
        raise ConfigError(f"{str(path)!r} is no checkpoint of Lightning's: it has no state_dict")
    return content


def _loaded(path: str | Path) -> dict[str, Any]:
    with open_stored(path) as file:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return content


def _plain(name: str | Path, read: Callable[[str | Path], Any], path: str | Path) -> dict[str, Any]:
    """Read a file without running anything in it."""
    try:
        content = read(path)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{str(name)!r} cannot be read as plain data: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{str(name)!r} holds {type(content).__name__}; expected Lightning's dict")
    return content


def _count_batches(content: dict[str, Any], batches: int) -> None:
    """Turn counts of steps into counts of a device's batches, as Lightning's own strategies have them.

    Without this package's keys the file is one of another strategy, which this package's strategies resume, too.
    """
    for key in OWN:
        content.pop(key, None)
    progress = content.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if progress is None:
        return
    for counts in (progress["current"], progress["total"]):
        open_batches = counts["processed"] - counts["completed"]  # one, if its hooks wrote the checkpoint
        counts |= {name: count * batches for name, count in counts.items()}
        counts["completed"] = counts["processed"] - open_batches


def _safetensors_writer() -> Callable[[dict[str, Tensor], Path], None]:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ConfigError(
            "a .safetensors file needs the package safetensors: pip install unicron-lightning[safetensors]"
        ) from None
    return save_file


def _apart(state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state, tied ones copied, as the format allows no shared memory."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor):
            memory = tensor.untyped_storage().data_ptr()
            found[name] = tensor.clone() if memory in seen else tensor.contiguous()
            seen.add(memory)
    return found
