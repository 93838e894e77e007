"""Plain data is encoded and decoded without pickle."""

from __future__ import annotations

import datetime
import enum
import math
import pathlib
import pickle
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import msgspec
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unicron_lightning.worker.codec import NotPlainData, check, decode, encode

Pair = namedtuple("Pair", "a b")

DTYPES = [
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not dtype.is_complex and "q" not in str(dtype).split(".")[1][0]
]

keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
scalars = (
    keys
    | st.floats(allow_nan=False)
    | st.binary()
    | st.timedeltas(min_value=datetime.timedelta(days=-1000), max_value=datetime.timedelta(days=1000))
)
plain = st.recursive(
    scalars | st.frozensets(st.integers()).map(set),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=30,
)


def same(a: Any, b: Any) -> bool:
    """Whether values are equal, including types: True is not 1, and 1.0 is not 1."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


@given(plain)
def test_round_trip(value: Any) -> None:
    assert same(decode(encode(value)), value)


@given(plain, plain)
def test_tensors_keep_their_places_in_a_tree(first: Any, second: Any) -> None:
    value = {"b": [first, torch.arange(3)], "a": (torch.zeros(2, 0), second, {"x": torch.tensor(7.5)})}
    result = decode(encode(value))
    assert same(result["b"][0], first) and same(result["a"][1], second)
    assert result["b"][1].tolist() == [0, 1, 2] and result["a"][0].shape == (2, 0)
    assert result["a"][2]["x"].shape == () and result["a"][2]["x"] == 7.5


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 5e-324, 2**63, -(2**63), 10**40, True, 1])
def test_numbers_are_exact(value: float) -> None:
    result = decode(encode([value]))[0]
    assert type(result) is type(value) and repr(result) == repr(value)


def test_nan() -> None:
    assert math.isnan(decode(encode({"x": math.nan}))["x"])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.complex128], ids=str)
def test_every_dtype_bit_by_bit(dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    data = torch.arange(6 * size, dtype=torch.int64).to(torch.uint8)
    tensor = (data % 2).bool() if dtype == torch.bool else data.view(dtype).view(2, 3)
    result = decode(encode(tensor))
    assert result.dtype == dtype and result.shape == tensor.shape
    assert torch.equal(result.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))


def test_views_and_parameters() -> None:
    base = torch.arange(12.0).view(3, 4)
    assert torch.equal(decode(encode(base.t()[1:])), base.t()[1:])
    result = decode(encode(torch.nn.Parameter(base)))
    assert not result.requires_grad and torch.equal(result, base)


def test_a_decoded_tensor_can_be_written_to() -> None:
    decode(encode(torch.zeros(4))).add_(1)


def test_other_kinds() -> None:
    colour = enum.Enum("Colour", {"RED": "red"}, type=str)
    value = OrderedDict(
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        path=pathlib.PurePosixPath("/a/b"),
        size=torch.Size([2, 3]),
        default=defaultdict(list, a=[1]),
        array=numpy.arange(4, dtype=numpy.float32),
        scalar=numpy.int64(3),
        colour=colour["RED"],
        set={1, "a", None},
    )
    result = decode(encode(value))
    assert type(result) is OrderedDict and list(result) == list(value)
    assert result["dtype"] is torch.bfloat16 and result["device"] == torch.device("cpu")
    assert result["path"] == pathlib.Path("/a/b") and result["size"] == (2, 3) and result["default"] == {"a": [1]}
    assert isinstance(result["array"], numpy.ndarray) and result["array"].dtype == numpy.float32
    assert result["scalar"] == 3 and result["colour"] == "red" and result["set"] == {1, "a", None}


def test_a_read_only_array() -> None:
    array = numpy.arange(3)
    array.flags.writeable = False
    assert decode(encode(array)).tolist() == [0, 1, 2]


def test_random_states_of_all_three_generators() -> None:
    from unicron_lightning.data.seeding import random_states, restore_random_states

    states = random_states()
    drawn = torch.rand(3), numpy.random.rand()
    restore_random_states(decode(encode(states)))
    assert torch.equal(torch.rand(3), drawn[0]) and numpy.random.rand() == drawn[1]


class Anything:
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"state": [1, {"x": Anything()}]}, r"value\['state'\]\[1\]\['x'\] is a \S+\.Anything"),
        ({"f": len}, r"value\['f'\]"),
        ((1, {Anything(): 1}), r"value\[1\] key"),
        (Pair(1, 2), "value is a"),
        ([torch.eye(2).to_sparse()], r"value\[0\] is a torch.sparse_coo tensor"),
    ],
)
def test_what_is_no_plain_data_is_named_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(NotPlainData, match=path):
        encode(value)


@given(st.binary(max_size=200))
def test_garbage_is_an_error(data: bytes) -> None:
    try:
        value = decode(data)
    except ValueError:
        return
    assert type(value) in (int, float, str, bool, type(None), list)  # the random bytes may be a number


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda x: (
            st.lists(x)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "tensor",
                        "array",
                        "dict",
                        "list",
                        "tuple",
                        "set",
                        "float",
                        "int",
                        "dtype",
                        "device",
                        "path",
                        "timedelta",
                        "bytes",
                        "code",
                    ]
                ),
                x,
                max_size=2,
            )
        ),
        max_leaves=8,
    )
)
def test_a_wrong_tree_is_an_error_or_plain_data(tree: Any) -> None:
    body = msgspec.json.encode(tree)
    try:
        value = decode(len(body).to_bytes(8, "little") + body)
    except ValueError:
        return
    encode(value)


def test_a_tensor_larger_than_the_message_is_refused_before_memory_is_taken() -> None:
    body = msgspec.json.encode({"tensor": ["float32", [1 << 40, 1 << 10]]})
    with pytest.raises(ValueError, match="bytes expected"):
        decode(len(body).to_bytes(8, "little") + body)


def test_pickles_are_never_loaded() -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("unpickled",))

    with pytest.raises(ValueError, match="not encoded plain data"):
        decode(pickle.dumps(Trap()))


def test_what_schedulers_keep_survives() -> None:
    """`MultiStepLR` keeps its milestones in a Counter; NumPy's infinities are converted like other floats."""
    value = {"milestones": Counter({3: 1, 5: 2}), "best": numpy.float64("inf")}
    back = decode(encode(value))
    assert type(back["milestones"]) is Counter and back == value


def test_checking_refuses_what_encoding_refuses() -> None:
    check({"a": torch.ones(2)})
    with pytest.raises(NotPlainData, match=r"value\['a'\]"):
        check({"a": object()})
