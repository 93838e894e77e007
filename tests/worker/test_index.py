"""The index of a checkpoint is a pickle: whatever it holds, reading it changes nothing in the process."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import pickletools
import random
import struct
import sys
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from unicron_lightning.checkpoints.files import INDEX
from unicron_lightning.checkpoints.index import _ALLOWED, StoredFolder, load_index
from unicron_lightning.errors import ConfigError

PROGRAMS = 20_000
ATTRIBUTES = (
    "open",
    "append",
    "extend",
    "add",
    "update",
    "__init__",
    "__new__",
    "__setstate__",
    "__reduce__",
    "__eq__",
)
ATTRIBUTES += ("__code__", "__defaults__", "__kwdefaults__", "__class__", "__dict__", "value", "name", "storage_data")


def globals_of_an_index() -> dict[tuple[str, str], Any]:
    names = [*_ALLOWED, ("torch", "float32")]
    found = {}
    for module, name in names:
        if module in sys.modules:
            found[module, name] = getattr(importlib.import_module(module), name)
    return found


def state_of_the_process() -> dict[str, Any]:
    """Attributes of all that an index may name, of their base classes and of the members of enumerations."""
    seen: dict[str, Any] = {}
    for (module, name), value in globals_of_an_index().items():
        things = [*value.__mro__[:-1]] if isinstance(value, type) else [value]
        things += list(getattr(value, "__members__", {}).values())
        for place, thing in enumerate(things):
            seen |= {f"{module}.{name} {place} {key}": id(each) for key, each in getattr(thing, "__dict__", {}).items()}
            for key in ("__code__", "__defaults__", "__kwdefaults__", "__class__"):
                seen[f"{module}.{name} {place} {key}"] = id(getattr(thing, key, None))
    return seen


def index() -> Metadata:
    properties = TensorProperties(dtype=torch.float32)
    stored = TensorStorageMetadata(properties=properties, size=torch.Size([2]), chunks=[])
    places = {MetadataIndex("a", torch.Size([0])): _StorageInfo("__0_0.distcp", 0, 8)}
    return Metadata(state_dict_metadata={"a": stored}, planner_data={"a": ("a",)}, storage_data=places)


def pushed(*values: bytes) -> bytes:
    return pickle.PROTO + b"\2" + b"".join(values) + pickle.STOP


def name(module: str, attribute: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value.encode())) + value.encode()


def with_slots(target: bytes, attribute: str, value: bytes) -> bytes:
    """Set an attribute, by the state of an object with slots."""
    slots = pickle.EMPTY_DICT + text(attribute) + value + pickle.SETITEM
    return pushed(target, pickle.NONE, slots, pickle.TUPLE2, pickle.BUILD)


def test_an_index_is_read_as_torch_reads_it() -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert load_index(io.BytesIO(pickle.dumps(index(), protocol)), "x") == index()


@pytest.mark.parametrize(
    ("module", "attribute", "changed"),
    [
        ("pathlib", "PosixPath", "open"),
        ("torch.distributed.checkpoint.metadata", "Metadata", "__init__"),
        ("torch.serialization", "_get_layout", "__defaults__"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", "TORCH_STRIDED"),
    ],
)
def test_attributes_of_classes_and_functions_are_not_set(module: str, attribute: str, changed: str) -> None:
    before = state_of_the_process()
    content = with_slots(name(module, attribute), changed, pickle.NONE + pickle.TUPLE1)
    with pytest.raises(ConfigError, match="are not set by an index; it was not loaded"):
        load_index(io.BytesIO(content), "x")
    assert state_of_the_process() == before and PosixPath.open is Path.open


def test_members_of_enumerations_are_not_changed() -> None:
    before = state_of_the_process()
    member = name("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING") + pickle.BININT1 + b"\0"
    content = with_slots(member + pickle.TUPLE1 + pickle.REDUCE, "_name_", text("other"))
    with pytest.raises(ConfigError, match="_MEM_FORMAT_ENCODING are not set by an index"):
        load_index(io.BytesIO(content), "x")
    assert state_of_the_process() == before


def test_no_program_of_opcodes_changes_the_process() -> None:
    draw, used, before = random.Random(1), set(), state_of_the_process()
    modules = set(sys.modules)
    valid = pickletools.optimize(pickle.dumps(index(), 2))
    for _ in range(PROGRAMS):
        program = Program(draw)
        content = program.content if draw.random() < 0.9 else mutated(draw, valid)
        used |= program.used
        try:
            load_index(io.BytesIO(content), "x")
        except ConfigError:
            pass
    assert used == {opcode.name for opcode in pickletools.opcodes}
    imported = {module for module in set(sys.modules) - modules if not module.startswith("encodings.")}
    assert state_of_the_process() == before and not imported


class Program:
    """A random pickle, most of whose opcodes find what they need on the stack."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._names = list(globals_of_an_index())
        self.used: set[str] = set()
        pieces = [self._value() for _ in range(draw.randrange(1, 4))]
        pieces += [self._opcode() for _ in range(draw.randrange(1, 12))]
        self.content = pickle.PROTO + b"\4" + b"".join(pieces) + pickle.STOP

    def _opcode(self) -> bytes:
        opcode = self._draw.choice(pickletools.opcodes)
        self.used.add(opcode.name)
        argument = b"" if opcode.arg is None else self._argument(opcode.arg)
        operands = b"".join(
            pickle.MARK
            if before is pickletools.markobject
            else b""
            if before is pickletools.stackslice
            else self._value()
            for before in opcode.stack_before
        )
        if pickletools.stackslice in opcode.stack_before:
            operands += self._value() + self._value()
        return operands + opcode.code.encode("latin-1") + argument

    def _operand(self, about: pickletools.StackObject) -> bytes:
        if about is pickletools.markobject:
            return pickle.MARK
        return self._value() + self._value() if about is pickletools.stackslice else self._value()

    def _value(self) -> bytes:
        kind = self._draw.randrange(8)
        if kind < 2:
            return name(*self._draw.choice(self._names))
        if kind == 2:
            return text(self._draw.choice(ATTRIBUTES))
        if kind == 3:  # an object of the index's own classes
            return name(*self._draw.choice(self._names)) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        if kind == 4:
            return name(*self._draw.choice(self._names)) + text("x") + pickle.TUPLE1 + pickle.REDUCE
        pair = text(self._draw.choice(ATTRIBUTES)) + name(*self._draw.choice(self._names))
        state = pickle.EMPTY_DICT + pair + pickle.SETITEM
        return state if kind == 5 else pickle.NONE + state + pickle.TUPLE2 if kind == 6 else pickle.EMPTY_TUPLE

    def _argument(self, about: pickletools.ArgumentDescriptor) -> bytes:
        if about.n >= 0:
            return bytes(self._draw.choice((0, 0, 1, 2, 255)) for _ in range(about.n))
        if about.name.startswith(("stringnl", "decimalnl", "floatnl", "unicodestringnl")):
            lines = [*self._draw.choice(self._names)] if about.name.endswith("pair") else ["1"]
            return "".join(f"{line}\n" for line in lines).encode()
        data = self._draw.choice(ATTRIBUTES).encode()
        size = {"1": 1, "4": 4, "8": 8}[next(digit for digit in about.name if digit in "148")]
        return len(data).to_bytes(size, "little") + data


def mutated(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.randrange(1, 4)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("place", ["/etc/passwd", "../other/__0_0.distcp", "a/../../b", 3])
def test_files_elsewhere_are_not_named(place: Any) -> None:
    found = index()
    found.storage_data = {MetadataIndex("a"): _StorageInfo(place, 0, 8)}
    with pytest.raises(ConfigError, match=f"it names {place!r}; expected files of its folder"):
        load_index(io.BytesIO(pickle.dumps(found)), "x")


def test_a_pipe_in_place_of_the_index_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX)
    with pytest.raises(OSError, match="no regular file"):
        StoredFolder(tmp_path)
