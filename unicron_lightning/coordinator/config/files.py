"""The state directory, which the configuration refers to."""

from __future__ import annotations

import os
from pathlib import Path

from unicron_lightning.errors import ConfigError
from unicron_lightning.folders import make_private, user_path


def default_state_dir(host: str, port: int) -> Path:
    """Return the default folder of the state of a coordinator at this endpoint."""
    if os.environ.get("UNICRON_STATE_DIR"):
        return Path(os.environ["UNICRON_STATE_DIR"])
    return user_path() / f"{host}-{port}"


def prepare_state_dir(path: Path) -> None:
    """Create the directory (mode 0700, parents too).

    Raises:
        ConfigError: it cannot be created, or others can write to it or to its parents; see `folders.make_private`.
    """
    try:
        make_private(path)
    except OSError as error:
        raise ConfigError(f"store.state_dir={path}: {error.strerror or error}; expected a folder of yours") from error
