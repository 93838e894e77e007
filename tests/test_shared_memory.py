from __future__ import annotations

import os
import random

import pytest

from unicron_lightning import wire
from unicron_lightning.shared_memory import allocate, digest_of, in_use, opened, verified

ROW = 8 << 10


def test_digests_differ_for_changes_that_sums_alone_would_miss() -> None:
    generator = random.Random(3)
    data = generator.randbytes(70 * ROW + 13)
    seen = {digest_of(data)}
    assert digest_of(bytearray(data)) in seen

    def swapped(first: int, second: int, size: int) -> bytes:
        found = bytearray(data)
        found[first : first + size], found[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )
        return bytes(found)

    changed = [
        swapped(0, ROW, ROW),  # rows
        swapped(0, 2 * ROW, 8),  # words of a column
        swapped(0, 40, 8),  # words of a row
        swapped(4096, 40 * ROW, 4096),  # pages
        data[:-1] + bytes([data[-1] ^ 1]),
        bytes([data[0] ^ 128]) + data[1:],
        data + b"\0",
        b"",
    ]
    for each in changed:
        digest = digest_of(each)
        assert digest not in seen
        assert len(digest) == 64
        seen.add(digest)


def test_a_keeper_is_seen_by_the_owner_until_it_closes() -> None:
    descriptor, content = allocate(1 << 16)
    content[:5] = b"state"
    version = wire.StateVersion(life=1, epoch=1, step=1, parts=1, copies=1, layout="0" * 64)
    copy = wire.StateCopy(version=version, part=0, size=5, digest=digest_of(b"state"))
    staged = wire.OpenCopy(copy=copy, descriptor=descriptor)
    assert not in_use(descriptor)
    kept = opened(os.getpid(), descriptor, 5)
    assert in_use(descriptor)
    assert verified(os.getpid(), staged) == b"state", "a second reader"
    os.close(kept)
    assert not in_use(descriptor)
    content[0] = 0
    with pytest.raises(OSError, match="expected"):
        verified(os.getpid(), staged)
    content.close()
    os.close(descriptor)
