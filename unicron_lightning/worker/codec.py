"""Encodes plain data as bytes, including tensors, without pickle.

The format is ``8 bytes length | JSON tree | raw tensor data``. The tree holds None, bool, int, float and str as they
are, and everything else as a one-key object naming its kind. Decoding can create only these kinds and never runs code.
"""

from __future__ import annotations

import datetime
import io
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy
import torch
from torch import Tensor

from unicron_lightning.errors import UnicronError

_SCALARS = (type(None), bool, int, float, str)
_sizes = msgspec.json.Decoder(list[int]).decode


class NotPlainData(UnicronError, TypeError):
    """A value to be sent is not plain data; the message contains the path to it and its type."""


def encode(value: Any) -> bytes:
    """Encode plain data.

    Raises:
        NotPlainData: the value contains anything else; the message contains the path to it.
    """
    tree, tensors = split(value)
    return joined(tree, [raw(tensor) for _, tensor in tensors])


def split(value: Any) -> tuple[bytes, list[tuple[str, Tensor]]]:
    """Return the tree of plain data, and its tensors with their paths: the parts of `joined`.

    Raises:
        NotPlainData: as `encode`.
    """
    tensors: list[tuple[str, Tensor]] = []
    tree = msgspec.json.encode(_pack(value, tensors, "value"))
    return tree, tensors


def joined(tree: bytes, blobs: Sequence[bytes]) -> bytes:
    """Return what `encode` returns, given the tree and the bytes of its tensors."""
    return b"".join([len(tree).to_bytes(8, "little"), tree, *blobs])


def check(value: Any) -> None:
    """Raise the errors of `encode` without the cost of copying tensors."""
    _pack(value, [], "value")


def decode(data: bytes) -> Any:
    """The value that was encoded; tensors are on the CPU.

    Raises:
        ValueError: the bytes do not come from `encode`.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    stream = io.BytesIO(data)
    stream.seek(min(end, len(data)))
    return _decoded(data[8:end], stream.read)


def restored(tree: bytes, blobs: Iterable[bytes | Tensor]) -> Any:
    """Return the value of a tree and the bytes of its tensors. A tensor of bytes (uint8, one dimension) becomes memory
    of the value.

    Raises:
        ValueError: they are not those of an encoded value.
    """
    rest = iter(blobs)
    return _decoded(tree, lambda _: next(rest, b""))


def _decoded(tree: bytes, following: Callable[[int], bytes | Tensor]) -> Any:
    try:
        return _unpack(msgspec.json.decode(tree), _Reader(following))
    except (msgspec.DecodeError, LookupError, TypeError, RuntimeError, OverflowError, ValueError) as error:
        raise ValueError(f"not encoded plain data: {str(error).splitlines()[0][:200]}") from error


class _Reader:
    def __init__(self, following: Callable[[int], bytes | Tensor]) -> None:
        self._following = following

    def take(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        part = self._following(size)
        if len(part) != size:  # checked before memory is allocated
            raise ValueError(f"tensor of {size} bytes expected, {len(part)} left")
        if isinstance(part, Tensor) and size:
            return part.view(dtype).view(shape)
        tensor = torch.empty(shape, dtype=dtype)
        if size:
            tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))
        return tensor


def raw(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements, in order."""
    return flat(tensor).numpy().tobytes() if tensor.numel() else b""


def flat(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's elements as uint8 of one dimension on the CPU; a copy only if it has to be."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg()  # lazy ones have no bytes of their own
    return values.contiguous().view(-1).view(torch.uint8)


def pack_parts(parts: Sequence[bytes]) -> bytes:
    """Join several byte strings into one."""
    header = msgspec.json.encode([len(part) for part in parts])
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def unpack_parts(data: bytes) -> list[bytes]:
    """The byte strings that were joined by `pack_parts`."""
    offset = 8 + int.from_bytes(data[:8], "little")
    parts = []
    for size in _sizes(data[8:offset]):
        parts.append(data[offset : offset + size])
        offset += size
    return parts


def _pack(value: Any, tensors: list[tuple[str, Tensor]], path: str) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise NotPlainData(f"{path} is a {value.layout} tensor; only dense tensors can be sent")
        tensors.append((path, value))
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"float": repr(float(value))}
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        return {"int": str(value)}
    if isinstance(value, _SCALARS) and type(value) in _SCALARS:
        return value
    return _pack_container(value, tensors, path)


def _pack_container(value: Any, tensors: list[tuple[str, Tensor]], path: str) -> Any:
    def each(items: Any) -> list[Any]:
        return [_pack(item, tensors, f"{path}[{index}]") for index, item in enumerate(items)]

    match value:
        case dict() if type(value) in (dict, OrderedDict, defaultdict, Counter):
            kind = {OrderedDict: "odict", Counter: "counter"}.get(type(value), "dict")
            return {
                kind: [
                    [_pack(k, tensors, f"{path} key"), _pack(v, tensors, f"{path}[{k!r}]")] for k, v in value.items()
                ]
            }
        case list():
            return {"list": each(value)}
        case tuple() if type(value) is tuple or isinstance(value, torch.Size):
            return {"tuple": each(value)}
        case set() | frozenset():
            return {"set": each(sorted(value, key=repr))}
        case bytes():
            return {"bytes": value.hex()}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": str(value)}
        case pathlib.PurePath():
            return {"path": str(value)}
        case datetime.timedelta():
            return {"timedelta": value.total_seconds()}
        case numpy.generic():
            return _pack(value.item(), tensors, path)
        case numpy.ndarray() if value.dtype.kind in "biuf":
            tensors.append((path, torch.from_numpy(value.copy())))
            return {"array": [str(tensors[-1][1].dtype).removeprefix("torch."), list(value.shape)]}
        case str() | int() | float():  # enums and other subclasses are sent as their plain value
            return _pack(value.value if hasattr(value, "value") else value.__class__.__mro__[-2](value), tensors, path)
    raise NotPlainData(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}; state that is sent to another worker must "
        "be plain data (numbers, strings, lists, dicts, tensors)"
    )


def _unpack(tree: Any, reader: _Reader) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, body),) = tree.items()
    match kind:
        case "tensor":
            return reader.take(_dtype(body[0]), body[1])
        case "array":
            return reader.take(_dtype(body[0]), body[1]).numpy()
        case "dict" | "odict" | "counter":
            # a single comprehension, so that tensors are read in the order in which they were written
            pairs = [(_unpack(k, reader), _unpack(v, reader)) for k, v in body]
            return {"dict": dict, "odict": OrderedDict, "counter": Counter}[kind](dict(pairs))
        case "list":
            return [_unpack(item, reader) for item in body]
        case "tuple":
            return tuple(_unpack(item, reader) for item in body)
        case "set":
            return {_unpack(item, reader) for item in body}
        case "bytes":
            return bytes.fromhex(body)
        case "float":
            return float(body)
        case "int":
            return int(body)
        case "dtype":
            return _dtype(body)
        case "device":
            return torch.device(body)
        case "path":
            return pathlib.Path(body)
        case "timedelta":
            return datetime.timedelta(seconds=body)
    raise ValueError(f"unknown kind {kind!r}")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype
