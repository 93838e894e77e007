"""The connection of Hydra and the schema: registration, and checks that Hydra leaves out."""

from __future__ import annotations

import os
from dataclasses import fields, is_dataclass
from typing import Any, cast, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from unicron_lightning import environ
from unicron_lightning.coordinator.config.schema import CoordinatorConfig
from unicron_lightning.errors import ConfigError, UnicronError
from unicron_lightning.sections import wrong


def register_schema() -> None:
    """Register the schema and the resolvers with Hydra, which then checks keys and types."""
    from hydra.core.config_store import ConfigStore

    OmegaConf.register_new_resolver("of_timeout", _of_timeout, replace=True)
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
    port = endpoint.rpartition(":")[2]
    if not port.isdecimal():
        raise ConfigError(f"{environ.ENDPOINT}={endpoint!r}: expected HOST:PORT")
    return int(port)


def _of_timeout(factor: float, least: float = 0.0, *, _parent_: DictConfig) -> float:
    # rounded to microseconds, to avoid 0.15000000000000002
    return round(max(float(factor) * float(_parent_.timeout), float(least)), 6)


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
