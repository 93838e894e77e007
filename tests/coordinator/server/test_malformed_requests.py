"""Requests that are no HTTP get a line in the coordinator's log, and no traceback."""

from __future__ import annotations

import logging
import socket
import sys
import time
from pathlib import Path

from coordinator.shell import Coordinator

from unicron_lightning.coordinator.server.peers import Malformed


def test_a_real_coordinator_logs_one_line(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path)
    with coordinator:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", coordinator.port), 10) as stranger:
                stranger.sendall(b"GET /" + b"0" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b" 400 " in stranger.recv(1000)
        claim = b":".join(b"0" * size for size in (64, 112, 64))
        begun = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Unicron " + claim + b"\r\n"
        for rest in (b"Content-Length: 100\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\nwrong\r\nabc"):
            with socket.create_connection(("127.0.0.1", coordinator.port), 10) as stranger:
                stranger.sendall(begun + rest)
                time.sleep(0.2)
        time.sleep(0.2)
        status, output = coordinator.stop()
    assert status == 0
    assert "request_malformed" in output and "Traceback" not in output
    assert output.count("request_malformed") < 20


def test_errors_of_handlers_keep_their_traceback() -> None:
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        record = logging.LogRecord("x", logging.ERROR, "x", 1, "Error handling request", None, sys.exc_info())
    assert Malformed().filter(record) and record.exc_info is not None
