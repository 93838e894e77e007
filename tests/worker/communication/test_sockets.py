"""Sockets known by descriptor and inode: shut down without a duplicate, and never another one's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unicron_lightning.worker.communication import sockets

FEW_DESCRIPTORS = """
import os, resource, socket, sys, threading
import torch.distributed as dist
from unicron_lightning.worker.communication.gloo import GlooGroup
from unicron_lightning.worker.communication.sockets import OutOfDescriptors

server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
stores = [dist.PrefixStore("a", dist.TCPStore("127.0.0.1", server.port, is_master=False)) for _ in range(2)]
opened = len(os.listdir("/proc/self/fd"))
limit = opened + 3
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
errors = []

def build(rank):
    try:
        GlooGroup(stores[rank], rank, 2, "127.0.0.1")
    except Exception as error:
        errors.append(error)
        if isinstance(error, OutOfDescriptors):
            print(error, flush=True)
            os._exit(0 if f"the limit of this process is {limit}" in str(error) else 3)

threads = [threading.Thread(target=build, args=(rank,), daemon=True) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(30)
print(errors, flush=True)
os._exit(4)
"""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        far.settimeout(10)
        yield near, far


def found(of: socket.socket) -> sockets.OpenSocket:
    return next(each for each in sockets.all_sockets() if each.descriptor == of.fileno())


def test_a_connection_is_shut_down_without_another_descriptor(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    here = found(near)
    here.shut_down()
    before = len(os.listdir("/proc/self/fd"))
    assert far.recv(1) == b""
    assert here.is_open()
    here.shut_down()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_reused_descriptor_is_left_alone(pair: tuple[socket.socket, socket.socket]) -> None:
    near, _ = pair
    here = found(near)
    other, peer = socket.socketpair()
    with other, peer:
        os.dup2(other.fileno(), near.fileno())
        assert not here.is_open()
        here.shut_down()
        peer.sendall(b"x")
        assert other.recv(1) == b"x"


def test_addresses_of_listeners_and_connections(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    with socket.create_server(("127.0.0.1", 0)) as server:
        addresses = sockets.ends([found(near), found(far), found(server)])
        assert addresses.listening == [server.getsockname()]
        ends = {near.getsockname(), near.getpeername()}
        assert addresses.connected == {found(near): ends, found(far): ends}


def test_the_limit_of_descriptors_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FEW_DESCRIPTORS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
