"""Checkpoints of a loop: files, or folders that are written beside the training."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from unicron_lightning.checkpoints.beside import CheckpointsBeside, TakenCheckpoint
from unicron_lightning.checkpoints.files import MODEL, is_folder, leave_record, located
from unicron_lightning.checkpoints.pieces import HeldCheckpoint
from unicron_lightning.checkpoints.reported import write_file
from unicron_lightning.checkpoints.saving import SaveFolder
from unicron_lightning.errors import ConfigError
from unicron_lightning.loop.registered import OF_SHARDS, RESERVED
from unicron_lightning.worker import codec

if TYPE_CHECKING:
    from unicron_lightning.loop.run import Run


class LoopCheckpoints(CheckpointsBeside):
    """Writes the checkpoints of a run, and removes old ones.

    Args:
        run: has what takes part.
        state: returns its state.
        folder: of those without a path of their own.
        keep: number of the newest ones there that stay; None: all.
        beside: whether they are folders that all workers write while training continues.
        partners: workers on other nodes that also hold each part of a folder.

    Attributes:
        kept: paths of those in the folder that have not been replaced, oldest first.
    """

    def __init__(
        self,
        run: Run,
        state: Callable[[], dict[str, Any]],
        folder: Path,
        keep: int | None,
        *,
        beside: bool,
        partners: int,
    ) -> None:
        super().__init__(run)
        self.kept: list[str] = []
        self._run_of, self._state, self._folder, self._keep = run, state, folder, keep
        self._beside, self._with_partners = beside, partners

    def begin(self) -> None:
        """Start what a loop needs."""
        if self._beside:
            self.use(str(self._folder), self._with_partners, overlap=False)

    def path(self, name: str, step: int) -> str:
        """Return the path of a checkpoint in the folder."""
        return located(self._folder / f"{name}step={step}.ckpt")

    def save(self, path: str, step: int, *, lasts: bool) -> None:
        """Write a checkpoint, for all members together.

        Args:
            path: of the checkpoint.
            step: optimizer steps finished.
            lasts: whether the script continues to train, while a folder is written.
        """
        if path == self.path("", step):
            self.kept = [*(each for each in self.kept if each != path), path]
        if self._beside:
            self.begin()
            self.write(path, lambda: TakenCheckpoint(step=step, resumable=True, held=self._held))
        else:
            self.write_whole(path, step)
        while self._keep is not None and len(self.kept) > self._keep:
            self.remove(self.kept.pop(0))
        if not lasts:
            self.close(whole=True)

    def write_whole(self, path: str, step: int) -> None:
        """Write a file by one worker, or by another one if that one dies meanwhile, and report it.

        For another number of shards it is a folder, to which the workers of a replica write their own parts.
        """
        session, engine = self._run_of.session, self._run_of.engine
        state = self._state()

        def done(digest: str) -> None:
            if session.record:
                leave_record(Path(session.record), path, step, digest, session.fits)

        def write(parts: Mapping[str, Any]) -> str:
            rest = {**state, **parts}
            models = rest.pop("models")
            found = write_file({**models, RESERVED: codec.encode(rest)}, Path(path))
            done(found)
            return found

        divided = engine.world.kind == "relayout"
        operation = (
            SaveFolder(path, self.held_parts, self._held, done) if divided else self._run_of.models.writing(write)
        )
        written = engine.run(operation).decode()
        self._run_of.reported.written(engine.control, path, step, written)

    def read(self, path: str) -> dict[str, Any]:
        """Return the state in a checkpoint; no code in it is run.

        Raises:
            ConfigError: it is none of a loop.
        """
        content: Any
        if is_folder(path):
            from unicron_lightning.checkpoints.index import read_checkpoint, read_whole  # half a second to import

            content, own = read_checkpoint(path), read_whole(path, {OF_SHARDS})
        else:
            content, own = torch.load(path, map_location="cpu", weights_only=True), {}
        saved = content.pop(RESERVED, None) if isinstance(content, dict) else None
        if saved is None:
            raise ConfigError(f"{path} is no checkpoint of run.save(): it has no {RESERVED!r}")
        state: dict[str, Any] = codec.decode(saved)
        state |= {key: [codec.decode(each) for each in states] for key, states in own.items()}
        if "models" not in state:
            return {**state, "models": content}
        models: dict[str, dict[str, Any]] = {name: {} for name in state["models"]}
        for key, value in content[MODEL].items():
            name, _, rest = key.partition(".")
            models[name][rest] = value
        optimizers = dict(zip(state["optimizers"], content["optimizer_states"], strict=True))
        return {**state, "models": models, "optimizers": optimizers}

    @override
    def held_parts(self) -> Sequence[str]:
        return self._run_of.models.held_parts()

    @override
    def remove_now(self, path: str) -> None:
        if Path(path).is_dir():
            shutil.rmtree(path)
        else:
            Path(path).unlink()

    def _held(self) -> HeldCheckpoint:
        """Return the state in the format of the strategies' folders: the rest has names of models and optimizers."""
        state = self._state()
        rest = {**state, "models": [*state["models"]], "optimizers": [*state["optimizers"]]}
        return self._run_of.models.held(state, {RESERVED: codec.encode(rest)})
