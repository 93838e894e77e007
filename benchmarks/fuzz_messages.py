"""Random messages of agents and daemons for `fuzz`: right ones with wild values, wrong ones, and no messages at all.

Values follow from the types of the vocabulary, so that a new message or field is attacked without a change here.
Names come from a small pool, so that messages concern the same tasks, agents and workers again and again.
"""

from __future__ import annotations

import json
import math
import random
import string
from typing import Any, get_args

import msgspec
from msgspec import inspect

from unicron_lightning import wire
from unicron_lightning.wire.daemon import FromNode

TASKS = ("fuzz-0", "fuzz-1", "fuzz-2")
NODES = ("fuzz-n0", "fuzz-n1", "fuzz-n2")
AGENTS = tuple(f"{node}-{number:08x}" for node in NODES for number in range(2))
WORKERS = tuple(f"{agent}/{rank}#{round_}" for agent in AGENTS for rank in range(2) for round_ in (1, 2))
SLOTS = ("0", "1")
POOLS: dict[str, tuple[Any, ...]] = {
    "task": TASKS,
    "name": TASKS,
    "agent": AGENTS,
    "worker": WORKERS,
    "node": NODES,
    "slot": SLOTS,
    "host": ("127.0.0.1", "127.0.0.1", "localhost", "192.0.2.7"),
    "round": (0, 1, 1, 2),
    "epoch": (0, 1, 2, 3, 4),
    "step": (0, 1, 2, 50),
    "protocol": (wire.PROTOCOL_VERSION,),
    "min_nodes": (1, 1, 2, 0, -1),
    "max_nodes": (2, 2, 4, 10**9),
    "size": (1, 2, 10**6),
    "local_world": (1, 2, None),
    "kind": ("task_hang", "nan_loss", "connection_failed", "ecc_error", "node_degraded", "unheard_of"),
    "phase": ("compute", "reduce", "validation", ""),
    "secret": ("00" * 16, "ab" * 16),
    "local_rank": (0, 1),
    "pid": (1, 2**31, 0),
    "number": (0, 1, 2, 3),
    "state": ({"step": 1, "has_state": True}, {"step": 2, "has_state": False, "founder": True}, {}),
}
TEXTS = (
    "",
    " ",
    "\x00",
    "\x1b[31m",
    "[bold]",
    "\u202e",
    "\ud7ff",
    "\U0001f600",
    "../../etc",
    "a" * 5000,
    "%s%n",
    "-1",
    "null",
)
NUMBERS = (0, -1, 1, 2**31, 2**53, 2**53 + 1, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, 5e-324)


class Wild:
    """Makes messages; the same from the same random numbers.

    Args:
        chance: the source of all choices.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self._agent = [inspect.type_info(kind) for kind in _members(wire.FromAgent)]
        self._node = [inspect.type_info(kind) for kind in _members(FromNode)]

    def to_agents_port(self) -> bytes:
        """One frame as of an agent."""
        return self._frame(self._agent)

    def to_nodes_port(self) -> bytes:
        """One frame as of a daemon."""
        return self._frame(self._node)

    def register(self) -> bytes:
        """The first message of an agent, mostly one that is accepted."""
        agent = self.chance.choice(AGENTS)
        message: dict[str, Any] = {
            "type": "register",
            "protocol": wire.PROTOCOL_VERSION,
            "task": self.chance.choice(TASKS),
            "agent": agent,
            "node": agent[:7],
            "host": "127.0.0.1",
            "pid": 1,
            "min_nodes": 1,
            "max_nodes": 4,
            "round": 1,
            "waiting": True,
            "granted": False,
            "store": {"host": "127.0.0.1", "port": 1},
            "local_world": None,
            "workers": [],
            "epoch": 0,
            "secret": "00" * 16,
        }
        if self.chance.random() < 0.3:
            message.update(self._changes(message))
        return _encode(message)

    def hello(self) -> bytes:
        """The first message of a daemon, mostly one that is accepted."""
        node = self.chance.choice(NODES)
        message = {"type": "node_hello", "protocol": wire.PROTOCOL_VERSION, "node": node, "host": "127.0.0.1"}
        return _encode({**message, "pid": 1, "started_at": 1.0, "slots": list(SLOTS), "tasks": []})

    def json(self, depth: int = 0) -> Any:
        """Any JSON value."""
        kind = self.chance.randrange(8 if depth < 4 else 5)
        if kind == 5:
            return [self.json(depth + 1) for _ in range(self.chance.randrange(4))]
        if kind >= 6:
            return {self.text(): self.json(depth + 1) for _ in range(self.chance.randrange(4))}
        return (None, self.chance.random() < 0.5, self.number(), self.text(), self.chance.choice(WORKERS))[kind]

    def text(self) -> str:
        """A text, seldom a reasonable one."""
        if self.chance.random() < 0.5:
            return self.chance.choice(TEXTS)
        return "".join(self.chance.choice(string.printable) for _ in range(self.chance.randrange(12)))

    def number(self) -> int | float:
        """A number, seldom a reasonable one."""
        return self.chance.choice(NUMBERS) if self.chance.random() < 0.5 else self.chance.randrange(-5, 100)

    def damaged(self, data: bytes) -> bytes:
        """The same with some bytes changed, missing or doubled."""
        for _ in range(self.chance.randrange(1, 4)):
            place = self.chance.randrange(len(data) + 1)
            cut = self.chance.randrange(3)
            if cut == 0:
                data = data[:place]
            elif cut == 1:
                data = data[:place] + bytes([self.chance.randrange(256)]) + data[place + 1 :]
            else:
                data = data[:place] + data[max(0, place - 20) :]
        return data

    def _frame(self, kinds: list[Any]) -> bytes:
        how = self.chance.random()
        if how < 0.05:
            return bytes(self.chance.randrange(256) for _ in range(self.chance.randrange(200)))
        if how < 0.1:
            return _encode(self.json())
        if how < 0.12:
            return b"[" * 100_000 if self.chance.random() < 0.5 else b'{"type":"beat","x":' + b"9" * 100_000 + b"}"
        message = self._value(self.chance.choice(kinds), "")
        if how < 0.3:
            message.update(self._changes(message))
        frame = _encode(message)
        return self.damaged(frame) if how > 0.92 else frame

    def _changes(self, message: dict[str, Any]) -> dict[str, Any]:
        field = self.chance.choice([*message])
        return {field: self.json()} if field != "type" else {self.text(): self.json()}

    def _value(self, kind: Any, field: str) -> Any:
        """A value that fits the type, within its bounds as far as they are simple."""
        match kind:
            case inspect.StructType():
                return self._struct(kind)
            case inspect.UnionType():
                return self._value(self.chance.choice(kind.types), field)
            case inspect.ListType() | inspect.SetType() | inspect.VarTupleType():
                return [self._value(kind.item_type, field) for _ in range(self.chance.choice((0, 1, 2, 5)))]
            case inspect.DictType():
                keys = [self._value(kind.key_type, field) for _ in range(self.chance.choice((0, 1, 3)))]
                return {str(key): self._value(kind.value_type, field) for key in keys}
            case inspect.NoneType():
                return None
        if field in POOLS and self.chance.random() < 0.8:
            return self.chance.choice(POOLS[field])
        match kind:
            case inspect.BoolType():
                return self.chance.random() < 0.5
            case inspect.IntType() | inspect.FloatType():
                return self._number_within(kind)
            case inspect.StrType():
                return self._text_within(kind)
            case inspect.LiteralType():
                return self.chance.choice(kind.values)
        return self.json()

    def _struct(self, kind: Any) -> dict[str, Any]:
        result = {} if kind.tag is None else {kind.tag_field: kind.tag}
        for field in kind.fields:
            if field.required or self.chance.random() < 0.7:
                result[field.encode_name] = self._value(field.type, field.encode_name)
        return result

    def _number_within(self, kind: Any) -> int | float:
        low = kind.ge if kind.ge is not None else kind.gt if kind.gt is not None else -(2**53)
        high = kind.le if kind.le is not None else kind.lt if kind.lt is not None else 2**53
        value = self.chance.choice((low, high, low + 1, high - 1, self.chance.uniform(0, 100)))
        return math.floor(value) if isinstance(kind, inspect.IntType) else float(value)

    def _text_within(self, kind: Any) -> str:
        text = "".join(self.chance.choice("ab/#-0\u00e9\u4e2d") for _ in range(self.chance.choice((1, 3, 30))))
        return (text * 50)[: kind.max_length or 1000] if self.chance.random() < 0.2 else text


def _members(union: Any) -> list[type]:
    return [kind for each in get_args(union) for kind in (_members(each) or [each])]


def _encode(value: Any) -> bytes:
    """JSON, with numbers that msgspec itself would refuse to write."""
    try:
        return msgspec.json.encode(value)
    except (OverflowError, TypeError, ValueError, UnicodeError):
        return json.dumps(value, default=str).encode(errors="replace")
