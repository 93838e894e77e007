"""Converts plain data into dataclasses, strictly: every error names the key in full and the expected value."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from unicron_lightning.errors import ConfigError

Section = TypeVar("Section")

_WORDS: typing.Final[Mapping[object, str]] = {
    float: "a number",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
}


def read_yaml(path: Path, overrides: Sequence[str], expected: str) -> dict[str, Any]:
    """Read a YAML file.

    Args:
        path: of the file.
        overrides: ``key=value`` with dots in the key, e.g. ``tasks.gpt.weight=2``.
        expected: some of its keys, in words.

    Raises:
        ConfigError: the file cannot be read, or is no mapping, or an override is malformed.
    """
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"--set {override}: expected key=value")
    try:
        data = msgspec.yaml.decode(path.read_bytes())
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: expected a mapping with {expected}")
        merged = OmegaConf.merge(OmegaConf.create(data), OmegaConf.from_dotlist(list(overrides)))
        return typing.cast("dict[str, Any]", OmegaConf.to_container(merged, resolve=True))
    except (OSError, msgspec.DecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {error}") from error


def read_section(kind: type[Section], data: object, where: str) -> Section:
    """Make a dataclass from a mapping, with nested dataclasses from nested mappings.

    Args:
        kind: the dataclass. Its fields may be dataclasses, mappings from names to dataclasses, or types that msgspec
            converts.
        data: the data that was read.
        where: the key of the whole, with dots; "" for the top.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, or a value that the dataclass refuses.
    """
    fields = {each.name: each for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or 'the file'}={data!r}: expected a mapping with {', '.join(fields)}")
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in data.items():
        if key not in fields:
            raise ConfigError(f"{_join(where, key)}={value!r}: unknown key, expected one of {', '.join(fields)}")
        values[key] = _convert(hints[key], value, _join(where, key))
    for name, each in fields.items():
        needed = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        if needed and name not in values:
            example = f", e.g. {each.metadata['example']}" if "example" in each.metadata else ""
            raise ConfigError(f"{_join(where, name)} is missing: expected {_say(hints[name])}{example}")
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _convert(hint: Any, value: object, where: str) -> object:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union) and value is not None:
        sections = [each for each in arguments if dataclasses.is_dataclass(each)]
        if sections:
            return read_section(typing.cast("type[object]", sections[0]), value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read_section(hint, value, where)
    if origin is dict and dataclasses.is_dataclass(arguments[1]):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}={value!r}: expected a mapping from names")
        kind = typing.cast("type[object]", arguments[1])
        return {
            str(name): read_section(kind, {} if item is None else item, _join(where, name))
            for name, item in value.items()
        }
    try:
        # Not strict, because in YAML 1.1 the number 1e15 is text.
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        raise ConfigError(f"{where}={value!r}: {text[0].lower()}{text[1:]}") from error


def _say(hint: object) -> str:
    if dataclasses.is_dataclass(hint) or typing.get_origin(hint) is dict:
        return "a mapping"
    return _WORDS.get(hint, f"{hint}")


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)
