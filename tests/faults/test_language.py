"""Texts of faults and their values: round trips, refusals, and lists of them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lightning.errors import ConfigError
from unicron_lightning.faults.fault import EXAMPLES, HANGS, KINDS, LASTING, PHASES, Fault, Faults, parse, text

FORMS = {
    "kill": Fault(kind="kill"),
    "kill rank=1 step=25 micro_batch=1": Fault(kind="kill", rank=1, step=25, micro_batch=1),
    "kill SIGTERM node=b": Fault(kind="kill", argument="SIGTERM", node="b"),
    "kill agent node=b": Fault(kind="kill agent", node="b"),
    "kill coordinator after=90s": Fault(kind="kill coordinator", after=90.0),
    "stop rank=2 for=5s": Fault(kind="stop", rank=2, duration=5.0),
    "hang spin node=b rate=2/h seed=7": Fault(kind="hang", argument="spin", node="b", rate=2.0, seed=7),
    "raise ecc_error rank=-1 phase=validation": Fault(kind="raise", argument="ecc_error", rank=-1, phase="validation"),
    "exit 3 rank=all times=2": Fault(kind="exit", argument=3, rank="all", times=2),
    "slow x3 rank=2 from_step=10 steps=20": Fault(kind="slow", argument=3.0, rank=2, from_step=10, steps=20),
    "slow x1.5 for=0.25s": Fault(kind="slow", argument=1.5, duration=0.25),
    "drop network node='rack 1=a' for=3s": Fault(kind="drop network", node="rack 1=a", duration=3.0),
    "corrupt gradient task=gpt step=0": Fault(kind="corrupt gradient", task="gpt", step=0),
    "kill joiner=yes phase=join": Fault(kind="kill", joiner=True, phase="join"),
    "kill step=4 bucket=2": Fault(kind="kill", step=4, bucket=2),
    "hang gil point=half_written world=4": Fault(kind="hang", argument="gil", point="half_written", world=4),
}


@pytest.mark.parametrize("words", FORMS)
def test_a_text_is_this_value_and_the_value_is_this_text(words: str) -> None:
    assert parse(words) == FORMS[words]
    assert text(FORMS[words]) == words


def test_every_kind_and_every_key_stands_in_a_form_above() -> None:
    assert {fault.kind for fault in FORMS.values()} == set(KINDS)
    used = {field.name for field in fields(Fault) if any(getattr(fault, field.name) for fault in FORMS.values())}
    assert used == {field.name for field in fields(Fault)}


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("kill term", "kill SIGTERM"),
        ("slow 3 steps=1", "slow x3 steps=1"),
        ("  hang   for=2m ", "hang for=120s"),
        ("stop for=200ms", "stop for=0.2s"),
        ("kill rate=48/d", "kill rate=2/h"),
        ("kill rate=0.5/m", "kill rate=30/h"),
        ("kill mtbf=30m", "kill rate=2/h"),
        ("kill joiner=no", "kill"),
        ('kill node="a b"', "kill node='a b'"),
        ("kill rank=1 SIGTERM", "kill SIGTERM rank=1"),
    ],
)
def test_other_ways_to_say_it(words: str, same: str) -> None:
    assert text(parse(words)) == same


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "begin with one of kill,"),
        ("kil rank=1", "begin with one of kill,"),
        ("rank=1 kill", "begin with one of kill,"),
        ("drop", "drop network"),
        ("kill SIGNOTHING", "expected a signal"),
        ("kill 9", "expected a signal"),
        ("hang loop", "expected one of sleep, spin, gil"),
        ("hang sleep spin", "'spin': expected key=value"),
        ("raise", "expected a kind of error"),
        ("raise lost_connection", "one of connection_failed, illegal_memory_access"),
        ("exit", "expected an exit status"),
        ("exit 256", "0 to 255"),
        ("exit -1", "0 to 255"),
        ("slow", "a factor such as x3"),
        ("slow x1", "a factor above 1"),
        ("slow y3", "a factor above 1"),
        ("corrupt gradient hard", "nothing but key=value"),
        ("kill where=1", "'where=1': expected one of task=, node=, rank="),
        ("kill rank=one", "a whole number (-1: the last rank), or all"),
        ("kill rank=1 rank=2", "'rank=2': given twice"),
        ("kill rate=2/h mtbf=1h", "'mtbf=1h': given twice"),
        ("kill step=1.5", "step=1.5: expected a whole number"),
        ("kill step=-1", "step=-1: expected a whole number >= 0"),
        ("kill times=0", "times=0: expected a whole number >= 1"),
        ("kill phase=lunch", "phase=lunch: expected one of exchange,"),
        ("kill for=5s", "for= with kill"),
        ("hang steps=2", "steps= with hang"),
        ("stop for=0", "for=0.0: expected a number > 0"),
        ("stop for=long", "a duration, e.g. 5, 200ms"),
        ("kill rate=2", "a number per s, m, h or d"),
        ("kill rate=0/h", "rate=0.0: expected a number > 0"),
        ("kill mtbf=0", "mtbf=0: expected a duration > 0"),
        ("kill node=", "node=: expected a name"),
        ("kill joiner=1", "joiner=1: expected yes or no"),
        ("kill step=1 from_step=2", "expected one of them"),
        ("kill coordinator node=a", "there is one coordinator"),
        ("kill phase=commit micro_batch=1", "expected phase=forward or micro_batch"),
        ("kill bucket=1 micro_batch=1", "expected it alone"),
        ("slow x2 phase=commit", "it begins with a forward"),
        ("slow x2 point=mine", "expected no point="),
        ("kill point=mine phase=commit", "expected it without phase= and bucket="),
        ("kill world=0", "world=0: expected a whole number >= 1"),
        ("kill node='b", "No closing quotation"),
    ],
)
def test_a_wrong_text_is_quoted_with_what_was_expected(words: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(words)
    assert repr(words) in str(refusal.value)
    assert expected in str(refusal.value)


def valid(given: dict[str, Any]) -> Fault | None:
    """Return a fault of these fields, None if they do not go together."""
    try:
        return Fault(**given)
    except ConfigError:
        return None


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


NUMBERS = st.floats(min_value=1e-9, max_value=1e18, allow_nan=False)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=("C",)), min_size=1)
WHOLE = st.integers(0, 1 << 40)
ARGUMENTS = {
    "kill": optional(st.sampled_from(["SIGTERM", "SIGSEGV"])),
    "hang": optional(st.sampled_from(HANGS)),
    "raise": st.sampled_from(sorted(EXAMPLES)),
    "exit": st.integers(0, 255),
    "slow": st.floats(min_value=1, max_value=1e6, exclude_min=True),
}
FAULTS = (
    st.sampled_from(KINDS)
    .flatmap(
        lambda kind: st.fixed_dictionaries(
            {"kind": st.just(kind), "argument": ARGUMENTS.get(kind.split()[0], st.none())},
            optional={
                "duration": NUMBERS if kind in LASTING else st.none(),
                "steps": optional(st.integers(1, 1000)) if kind == "slow" else st.none(),
                "task": NAMES,
                "node": st.none() if kind == "kill coordinator" else NAMES,
                "rank": st.integers(-100, 100_000) | st.just("all"),
                "joiner": st.booleans(),
                "step": WHOLE,
                "from_step": WHOLE,
                "micro_batch": WHOLE,
                "bucket": WHOLE,
                "phase": st.sampled_from(PHASES),
                "point": NAMES,
                "world": st.integers(1, 100_000),
                "after": NUMBERS,
                "rate": NUMBERS,
                "times": st.integers(1, 1000),
                "seed": st.integers(-(1 << 40), 1 << 40),
            },
        )
    )
    .map(valid)
    .filter(lambda fault: fault is not None)
)


@given(FAULTS)
def test_every_value_survives_the_way_through_its_text(fault: Fault) -> None:
    words = text(fault)
    assert parse(words) == fault
    assert text(parse(words)) == words


@given(st.text() | st.lists(st.sampled_from([*FORMS, "=", "'", "x", "kill"])).map(" ".join))
def test_any_text_is_a_fault_or_is_refused_with_one_error(words: str) -> None:
    try:
        fault = parse(words)
    except ConfigError as error:
        refusal, fault = str(error), None
    if fault is None:
        assert repr(words) in refusal
    else:
        assert parse(text(fault)) == fault


def test_a_list_of_texts_or_faults() -> None:
    script = Faults([*FORMS])
    assert script.texts == [*FORMS]
    assert Faults(script) == script and Faults("kill rank=1")[0] in Faults(["kill rank=1", "stop"])
    assert hash(Faults(script.texts)) == hash(script) and len(script) == len(FORMS)
    assert "kill rank=1" in repr(script)
    with pytest.raises(ConfigError, match="expected a factor above 1"):
        Faults("slow x1")


def test_a_seed_for_those_that_have_none() -> None:
    assert Faults(["kill seed=1", "stop"]).seeded(4).texts == ["kill seed=1", "stop seed=4"]


def test_a_file_is_a_list_of_texts(tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text("- kill rank=1 step=25\n- slow x3 for=10s  # a weak machine\n")
    assert Faults.read(path).texts == ["kill rank=1 step=25", "slow x3 for=10s"]
    for wrong in ("kill: 1\n", "- [kill]\n", "- kill rank=x\n", "{"):
        path.write_text(wrong)
        with pytest.raises(ConfigError):
            Faults.read(path)
    with pytest.raises(ConfigError, match=r"none\.yaml: expected a YAML list"):
        Faults.read(tmp_path / "none.yaml")
