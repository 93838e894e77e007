"""``python -m unicron_lightning.coordinator [group=choice ...] [group.key=value ...]``: run a coordinator.

Configured by Hydra: ``--cfg job`` shows the configuration, ``--help`` the groups and keys, ``--info`` the source of
each value. A wrong key or value ends the process with one message (HYDRA_FULL_ERROR=1: with the full traceback).

Checks that Hydra leaves out are made here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, cast, get_type_hints

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from unicron_lightning import environ
from unicron_lightning.coordinator.config import CoordinatorConfig, register_resolvers
from unicron_lightning.credentials import Token, find_token, is_loopback, user_file
from unicron_lightning.errors import ConfigError, PortInUse, UnicronError
from unicron_lightning.sections import wrong

logger = logging.getLogger(__name__)


def register_schema() -> None:
    """Register the schema and the resolvers with Hydra, which then checks keys and types."""
    from hydra.core.config_store import ConfigStore

    register_resolvers()
    OmegaConf.register_new_resolver("endpoint_port", _endpoint_port, replace=True)
    ConfigStore.instance().store(name="coordinator_schema", node=CoordinatorConfig)


def from_composed(composed: DictConfig) -> CoordinatorConfig:
    """Convert the configuration to objects.

    Raises:
        ConfigError: an unknown key, which Hydra allows to be added with ``+``, or a wrong value.
    """
    _check_keys(composed, prefix="")
    config = cast(CoordinatorConfig, OmegaConf.to_object(composed))
    config.jobs()
    return config


def explain(error: BaseException) -> str:
    """Describe an error in the command line or a file, in one line where it concerns a key or its value."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(error, UnicronError):
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            known = _known(cause.object_type)
            if known and str(cause.key) not in known:
                return f"{cause.full_key}: unknown key; known are {', '.join(known)}"
            if "subclass of TaskConfig" in str(cause):
                # Hydra can't add a key of a dictionary of dataclasses by a value, only by a choice.
                return f"tasks.{cause.full_key}: no such task; make it by +tasks@tasks.{cause.full_key}=task first"
            if isinstance(cause, ValidationError) and str(cause.key) in known:
                return wrong(get_type_hints(cause.object_type)[str(cause.key)], cause.value, cause.full_key)
            return f"{cause.full_key}: {str(cause.msg or cause).splitlines()[0]}"
        cause = cause.__cause__
    return str(error)


def _endpoint_port(default: int) -> int:
    """Return the port of the variable that names the coordinator to all commands, which this is one of."""
    endpoint = os.environ.get(environ.ENDPOINT)
    if not endpoint:
        return default
    ports = {each.rpartition(":")[2].strip() for each in endpoint.split(",")}
    if len(ports) > 1:
        raise ConfigError(f"{environ.ENDPOINT}={endpoint!r}: its ports differ; expected coordinator.port for this one")
    port = ports.pop()
    if not port.isdecimal():
        raise ConfigError(f"{environ.ENDPOINT}={endpoint!r}: expected HOST:PORT")
    return int(port)


def _check_keys(node: DictConfig, prefix: str) -> None:
    kind = OmegaConf.get_type(node)
    known = _known(kind)
    key: Any
    for key in node:
        name = f"{prefix}{key}"
        if known and key not in known:
            raise ConfigError(f"{name}: unknown key; known are {', '.join(known)}")
        if OmegaConf.is_missing(node, key):
            raise ConfigError(f"{name} is missing: expected a value")
        child: Any = None if OmegaConf.is_interpolation(node, key) else node[key]
        if isinstance(child, DictConfig):
            _check_keys(child, f"{name}.")


def _known(kind: Any) -> list[str]:
    return sorted(field.name for field in fields(kind)) if isinstance(kind, type) and is_dataclass(kind) else []


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
    from unicron_lightning.coordinator.server.peers import defer_full_runs
    from unicron_lightning.coordinator.server.server import Server  # Not needed to show the configuration.

    defer_full_runs()

    token = _token(config)
    logger.info("token_found origin=%s", token.origin)

    async def main() -> bool:
        if config.store.kind == "etcd":
            return await _take_turns(config, token)
        return await Server(config, token).run()

    try:
        return 0 if asyncio.run(main()) else 1
    except PortInUse as error:
        if config.coordinator.exit_when_idle:
            logger.info("port_in_use %s", error)  # another agent's coordinator was faster, which is fine
            return 0
        logger.error("%s", error)
        return 1


async def _take_turns(config: CoordinatorConfig, token: Token) -> bool:
    """Stand by, lead while etcd allows it, and stand by again; return whether the end was in order."""
    from unicron_lightning.coordinator.access import bind, resolve
    from unicron_lightning.coordinator.replicated import Deposed, leader_store
    from unicron_lightning.coordinator.server.server import Server

    bind(resolve(config.coordinator.host, config.coordinator.port)).close()  # a taken port is an error at once
    while True:
        store = leader_store(config)
        try:
            await store.lead()
            server = Server(config, token, store)
        except Deposed as error:
            await store.release()
            logger.warning("leadership_lost reason=%s", error)
            continue
        except BaseException:
            await store.release()
            raise
        in_order = await server.run()
        if server.deposed is None or store.failed:
            return in_order and not store.failed
        if server.gave_way:
            await asyncio.sleep(config.store.lease_seconds)


def _token(config: CoordinatorConfig) -> Token:
    from unicron_lightning.coordinator.access import resolve

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
