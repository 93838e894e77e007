"""Plain data into dataclasses: valid values are converted, invalid ones are named."""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass
from typing import Literal

import pytest

from unicron_lightning.cli.plan import situation
from unicron_lightning.errors import ConfigError
from unicron_lightning.sections import read_section


@dataclass(frozen=True, kw_only=True)
class Inner:
    number: int
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.number == 13:
            raise ValueError("number=13: expected another")


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    perhaps: Inner | None = None
    by_name: dict[str, Inner] = field(default_factory=dict)
    table: dict[int, float] = field(default_factory=dict)
    mode: Literal["a", "b"] = "a"
    texts: list[str] | None = None
    lists: dict[int, list[int]] = field(default_factory=dict)
    maybe: bool | None = None


def test_everything_that_may_be_said() -> None:
    data = {
        "inner": {"number": 3, "share": "1e15"},
        "perhaps": {"number": 1},
        "by_name": {"x": {"number": 2}},
        "table": {8: "1e15", "16": 2},
    }
    expected = Outer(
        inner=Inner(number=3, share=1e15),
        perhaps=Inner(number=1),
        by_name={"x": Inner(number=2)},
        table={8: 1e15, 16: 2.0},
    )
    assert read_section(Outer, data, "") == expected
    assert read_section(Outer, {"inner": {"number": 3}, "perhaps": None}, "").perhaps is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "inner is missing: expected a mapping"),
        ({"inner": {}}, "inner.number is missing"),
        ({"inner": {"number": 1, "nmber": 2}}, "inner.nmber=2: unknown key, expected one of number, share"),
        ({"inner": {"number": 1.5}}, "inner.number=1.5: expected a whole number"),
        ({"inner": {"number": 13}}, "inner: number=13: expected another"),
        ({"inner": {"number": 1}, "by_name": {"x": {"number": "y"}}}, "by_name.x.number='y': expected a whole number"),
        ({"inner": {"number": 1}, "by_name": {"x": 0}}, "by_name.x=0: expected a mapping"),
        ({"inner": {"number": 1}, "by_name": [1]}, "expected a mapping from names"),
        ({"inner": {"number": 1}, "perhaps": 7}, "perhaps=7: expected a mapping with number, share"),
        ({"inner": {"number": 1}, "table": {"x": 1}}, "a key of table='x': expected a whole number"),
        ({"inner": {"number": 1}, "table": {"1": "y"}}, "table.1='y': expected a number"),
        ({"inner": {"number": 1}, "table": 1}, "table=1: expected a mapping from whole numbers to numbers"),
        ({"inner": {"number": None}}, "inner.number=null: expected a whole number"),
        ({"inner": {"number": 1}, "mode": "c"}, "mode='c': expected one of a, b"),
        ({"inner": {"number": 1}, "texts": ["a", 1]}, "texts[1]=1: expected a text"),
        ({"inner": {"number": 1}, "texts": "a"}, "texts='a': expected a list of texts"),
        ({"inner": {"number": 1}, "lists": {1: [True]}}, "lists.1[0]=True: expected a whole number"),
        ({"inner": {"number": 1}, "lists": 1}, "expected a mapping from whole numbers to lists of whole numbers"),
        ({"inner": {"number": 1}, "maybe": "x"}, "maybe='x': expected true or false, or null"),
        ([1], "the file=[1]: expected a mapping with inner"),
    ],
)
def test_what_is_wrong_is_named(data: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_section(Outer, data, "")
    assert words in str(caught.value)


def test_every_section_of_the_schema_is_a_frozen_dataclass() -> None:
    found = [each for each in vars(situation).values() if isinstance(each, type) and is_dataclass(each)]
    sections = [each for each in found if each.__name__.endswith(("Config", "Profile"))]
    assert len(sections) == 8
    for each in sections:
        assert each.__dataclass_params__.frozen
