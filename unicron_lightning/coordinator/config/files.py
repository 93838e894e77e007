"""What the configuration names outside of itself: the state directory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from unicron_lightning.errors import ConfigError


def default_state_dir(host: str, port: int) -> Path:
    """Where a coordinator at this endpoint keeps its state unless told otherwise."""
    if os.environ.get("UNICRON_STATE_DIR"):
        return Path(os.environ["UNICRON_STATE_DIR"])
    return Path(tempfile.gettempdir()) / f"unicron-{os.getuid()}" / f"{host}-{port}"


def prepare_state_dir(path: Path) -> None:
    """Create the directory (mode 0700, parents too).

    Raises:
        ConfigError: it cannot be created, or belongs to another user, as could be arranged in a shared temporary
            directory.
    """
    try:
        for folder in (path.parent, path):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat().st_uid
    except OSError as error:
        raise ConfigError(f"store.state_dir={path}: {error.strerror or error}; expected a folder of yours") from error
    if owner != os.getuid():
        raise ConfigError(f"store.state_dir={path} belongs to user {owner}, not to you: choose another directory")
