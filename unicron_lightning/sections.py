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

_WORDS: typing.Final[Mapping[object, tuple[str, str]]] = {
    float: ("a number", "numbers"),
    int: ("a whole number", "whole numbers"),
    str: ("a text", "texts"),
    bool: ("true or false", "true or false"),
    types.NoneType: ("null", "null"),
}
"""Of each type, for one value and for many."""
_UNIONS: typing.Final = (types.UnionType, typing.Union)


def in_words(hint: Any, *, many: bool = False) -> str:
    """Describe the values of a type to users, e.g. ``a list of whole numbers, or null``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return ", or ".join(in_words(each, many=many) for each in arguments)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is list:
        return f"{'lists' if many else 'a list'} of {in_words(arguments[0], many=True)}"
    if origin is dict:
        keys = "names" if arguments[0] is str else in_words(arguments[0], many=True)
        return f"{'mappings' if many else 'a mapping'} from {keys} to {in_words(arguments[1], many=True)}"
    if dataclasses.is_dataclass(hint):
        return "mappings" if many else "a mapping"
    one, several = _WORDS.get(hint, ("a value", "values"))
    return several if many else one


def wrong(hint: Any, value: object, where: str) -> str:
    """Return the error of a value that is not of its type; ``where``: its key in full."""
    return f"{where}={'null' if value is None else repr(value)}: expected {in_words(hint)}"


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
            raise ConfigError(f"{_join(where, name)} is missing: expected {in_words(hints[name])}{example}")
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _convert(hint: Any, value: object, where: str) -> object:
    """Convert a value; an error names the innermost wrong one."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS and value is not None:
        made = [each for each in arguments if dataclasses.is_dataclass(each) or typing.get_origin(each) in (dict, list)]
        if made:
            return _convert(made[0], value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read_section(hint, value, where)
    if origin is list and isinstance(value, list):
        return [_convert(arguments[0], item, f"{where}[{place}]") for place, item in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        if dataclasses.is_dataclass(arguments[1]):
            named = {str(name): {} if item is None else item for name, item in value.items()}
            return {name: _convert(arguments[1], item, _join(where, name)) for name, item in named.items()}
        return {
            _plain(arguments[0], name, f"a key of {where}"): _convert(arguments[1], item, _join(where, name))
            for name, item in value.items()
        }
    return _plain(hint, value, where)


def _plain(hint: Any, value: object, where: str) -> object:
    try:
        # Not strict, because in YAML 1.1 the number 1e15 is text.
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError:
        raise ConfigError(wrong(hint, value, where)) from None


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)
