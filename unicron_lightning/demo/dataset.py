"""Data set of English text that exists on every machine: the topics of Python's own ``help()``."""

from __future__ import annotations

import pydoc_data.topics

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Windows(Dataset[tuple[int, Tensor]]):
    """Windows of ``length + 1`` bytes, with their numbers.

    Args:
        start, stop: part of the text, as fractions of it.
        length: context of the model in bytes.
        limit: largest number of windows.
    """

    def __init__(self, start: float, stop: float, length: int, limit: int) -> None:
        text = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics)).encode()
        part = text[int(start * len(text)) : int(stop * len(text))]
        self._bytes = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        self._length = length
        self._number = min(limit, (len(part) - 1) // length)

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        start = index * self._length
        return index, self._bytes[start : start + self._length + 1].long()
