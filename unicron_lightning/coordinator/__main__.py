"""``python -m unicron_lightning.coordinator [group=choice ...] [group.key=value ...]``: run a coordinator.

Configured by Hydra: ``--cfg job`` shows the configuration, ``--help`` the groups and keys, ``--info`` the source of
each value. A wrong key or value ends the process with one message (HYDRA_FULL_ERROR=1: with the full traceback).
"""

from __future__ import annotations

import asyncio
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
from unicron_lightning.coordinator.config.schema import CoordinatorConfig
from unicron_lightning.credentials import Token, find_token, is_loopback, user_file
from unicron_lightning.errors import ConfigError, PortInUse, UnicronError

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
    try:
        status = _serve(from_composed(composed))
    except _WRONG as error:
        logger.error("%s", explain(error))
        status = 2
    sys.exit(status)


def _serve(config: CoordinatorConfig) -> int:
    """Run a coordinator to its end; return the exit status of the process."""
    from unicron_lightning.coordinator.server.garbage import defer_full_runs
    from unicron_lightning.coordinator.server.server import Server  # Not needed to show the configuration.

    defer_full_runs()

    token = _token(config)
    logger.info("token_found origin=%s", token.origin)

    async def main() -> bool:
        return await Server(config, token).run()

    try:
        return 0 if asyncio.run(main()) else 1
    except PortInUse as error:
        if config.coordinator.exit_when_idle:
            logger.info("port_in_use %s", error)  # another agent's coordinator was faster, which is fine
            return 0
        logger.error("%s", error)
        return 1


def _token(config: CoordinatorConfig) -> Token:
    from unicron_lightning.coordinator.access.listening import resolve

    host = config.coordinator.host
    loopback = is_loopback(str(resolve(host, config.coordinator.port)[4][0]))
    token = find_token(config.coordinator.token_file, make=loopback)
    if token is None:
        raise ConfigError(
            f"coordinator.host={host} can be reached from other machines: set a token (UNICRON_TOKEN or "
            f"coordinator.token_file), or make the file {user_file()}; it must be the same on all hosts"
        )
    return token


if __name__ == "__main__":
    main()
