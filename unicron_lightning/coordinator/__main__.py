"""``python -m unicron_lightning.coordinator [group=choice ...] [group.key=value ...]``: run a coordinator.

Configured by Hydra: ``--cfg job`` shows the configuration, ``--help`` the groups and keys, ``--info`` the source of
each value. A wrong key or value ends the process with one message (HYDRA_FULL_ERROR=1: with the full traceback).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from unicron_lightning.coordinator.config.composition import explain, from_composed, register_schema
from unicron_lightning.errors import UnicronError

logger = logging.getLogger(__name__)

_FULL_ERROR = "HYDRA_FULL_ERROR"
_WRONG = (UnicronError, HydraException, OmegaConfBaseException)


def main(arguments: list[str] | None = None) -> None:
    """Run with the given command line (default: the process's); exit with the coordinator's status."""
    if arguments is not None:
        sys.argv = [sys.argv[0], *arguments]
    register_schema()
    run = hydra.main(version_base="1.3", config_path="pkg://unicron_lightning.conf", config_name="coordinator")(_run)
    if os.environ.get(_FULL_ERROR) == "1":
        run()
        return
    try:
        with _errors_raised():
            run()
    except _WRONG as error:
        sys.exit(f"coordinator: {explain(error)}")


@contextmanager
def _errors_raised() -> Iterator[None]:
    """Make Hydra raise errors, since its own messages advise adding unknown keys with ``+``."""
    before = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = before


def _run(composed: DictConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    from unicron_lightning.coordinator.server.server import serve  # Not needed to show the configuration.

    try:
        status = serve(from_composed(composed))
    except _WRONG as error:
        logger.error("%s", explain(error))
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
