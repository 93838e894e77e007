"""When links are encrypted, and which certificates are accepted: the decisions, and real coordinators and clients."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from coordinator.shell import Coordinator, answers, connected, train

from unicron_lightning.agent import embedded
from unicron_lightning.agent.coordinator_session import CoordinatorSession, SessionHooks
from unicron_lightning.certificates import Issued, issue, load_ca
from unicron_lightning.cli.certs import write_certificates
from unicron_lightning.cli.client import fetch
from unicron_lightning.coordinator.access import certificate_wanted, encryption_of
from unicron_lightning.coordinator.config import ProcessConfig
from unicron_lightning.credentials import Token
from unicron_lightning.errors import ConfigError, CoordinatorUnavailable, CoordinatorUnproven
from unicron_lightning.link import open_socket
from unicron_lightning.tls import PLAIN, Access, Trust, fingerprint_of, trust_for

SECRET = "a secret that must not be sent"
TOKEN = Token(secret=SECRET, origin="a test")
YEAR = datetime.timedelta(days=365)
AUTO = trust_for("127.0.0.1", tls="auto")
FAR = "192.0.2.1"
"""No address of this machine: nothing is ever sent there."""


# ---- decisions


def test_links_beyond_loopback_are_encrypted_by_default() -> None:
    assert trust_for("127.0.0.1") == Trust(encrypted=False, may_encrypt=True)
    assert trust_for("localhost") == trust_for("127.8.9.10") == trust_for("::1") == trust_for("127.0.0.1")
    for host in (FAR, "node0.example", "::", "2001:db8::1"):
        assert trust_for(host) == Trust(encrypted=True), host
    assert certificate_wanted(ProcessConfig(host="0.0.0.0"), loopback=False) == "auto"
    assert certificate_wanted(ProcessConfig(), loopback=True) is None
    assert certificate_wanted(ProcessConfig(tls="auto"), loopback=True) == "auto"
    assert certificate_wanted(ProcessConfig(tls="c.pem"), loopback=False) == "c.pem"


def test_plain_links_beyond_loopback_take_an_option_and_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert trust_for("127.0.0.1", plaintext=True) == Trust(encrypted=False)
        assert encryption_of(ProcessConfig(plaintext=True), loopback=True) is None
        assert caplog.records == []
        assert trust_for(FAR, plaintext=True) == Trust(encrypted=False)
        assert f"link_not_encrypted host={FAR}" in caplog.text
        assert encryption_of(ProcessConfig(host="0.0.0.0", plaintext=True), loopback=False) is None
        assert "links_not_encrypted host=0.0.0.0" in caplog.text


def test_wrong_options(tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    no = str(tmp_path / "no.pem")
    client: Any
    for client, said in (
        ({"tls": "auto", "plaintext": True}, "--tls auto and plaintext: expected one of them"),
        ({"tls": "sha256:12"}, "--tls sha256:12: expected auto, the path of a CA's certificate, or sha256:"),
        ({"tls": "/no/such"}, "--tls /no/such: no such file; expected auto"),
        ({"tls": no}, f"--tls {no}: expected a CA's certificate"),
        ({"tls": "auto", "client": no}, f"--tls-client {no}: expected a certificate and its key"),
        ({"client": "/no/such"}, "--tls-client /no/such: No such file"),
    ):
        with pytest.raises(ConfigError) as raised:
            trust_for(FAR, option="--tls ", **client)
        assert said in str(raised.value)
    with pytest.raises(ConfigError, match="--rdzv-conf tls_client=/no/such"):
        trust_for(FAR, client="/no/such", option="--rdzv-conf tls=")
    coordinator: Any
    for coordinator, said in (
        ({"plaintext": True, "tls": "auto"}, "coordinator.plaintext=true: expected neither coordinator.tls"),
        ({"tls_client_ca": no}, f"coordinator.tls_client_ca={no}: expected coordinator.tls too"),
        ({"tls": "auto", "tls_client_ca": no}, f"coordinator.tls_client_ca={no}: expected a CA's certificate"),
        ({"tls": no}, f"coordinator.tls={no}: expected auto, or a certificate with its key"),
        ({"tls": "/no/such"}, "coordinator.tls=/no/such: No such file"),
        ({"tls": "auto", "tls_key": no}, f"coordinator.tls_key={no}: expected the certificate in coordinator.tls"),
    ):
        with pytest.raises(ConfigError) as raised:
            encryption_of(ProcessConfig(**coordinator), loopback=True)
        assert said in str(raised.value)


def test_an_embedded_coordinator_is_started_as_its_agent_trusts(tmp_path: Path) -> None:
    assert embedded._encryption(PLAIN, "127.0.0.1") == []
    assert embedded._encryption(trust_for("node0"), "node0") == ["coordinator.tls=auto"]
    assert embedded._encryption(trust_for("node0", plaintext=True), "node0") == ["coordinator.plaintext=true"]
    write_certificates(tmp_path, ["node0"], ["me"], YEAR)
    ca, own = tmp_path / "ca.pem", tmp_path / "client-me.pem"
    assert embedded._encryption(trust_for("node0", tls=str(ca), client=str(own)), "node0") == [
        f"coordinator.tls={tmp_path}/coordinator.pem",
        f"coordinator.tls_client_ca={ca}",
    ]
    (tmp_path / "coordinator.pem").unlink()
    with pytest.raises(CoordinatorUnavailable, match=rf"\(unicron certs {tmp_path} --host node0\); or use tls=auto"):
        embedded._encryption(trust_for("node0", tls=str(ca)), "node0")
    with pytest.raises(CoordinatorUnavailable, match="expected tls=auto"):
        embedded._encryption(trust_for("node0", tls="sha256:" + "0" * 64), "node0")


# ---- real coordinators


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    write_certificates(folder, ["localhost", "127.0.0.2"], ["me"], YEAR)
    return folder


def run(tmp_path: Path, *overrides: str) -> Coordinator:
    return Coordinator(tmp_path / "state", *overrides, env={"UNICRON_TOKEN": SECRET})


def ask(port: int, trust: Trust, host: str = "127.0.0.1") -> Any:
    """By a command's means and by an agent's: the same answer, or the same error."""
    endpoint = f"{host}:{port}"
    said: list[str] = []
    for way in (_by_command, _by_agent):
        try:
            way(endpoint, trust)
            said.append("")
        except CoordinatorUnproven as error:
            said.append(str(error))
    assert said[0] == said[1], "commands and agents are told the same"
    if said[0]:
        assert "\n" not in said[0]
        raise CoordinatorUnproven(said[0])


def _by_command(endpoint: str, trust: Trust) -> None:
    assert fetch(endpoint, "/v1/status", Access(token=TOKEN, trust=trust))["tasks"] == {}


def _by_agent(endpoint: str, trust: Trust) -> None:
    async def opened() -> None:
        try:
            async with aiohttp.ClientSession() as http:
                await (await open_socket(http, f"http://{endpoint}/v1/agent", Access(token=TOKEN, trust=trust))).close()
        finally:
            await asyncio.sleep(0.05)  # aiohttp closes encrypted connections some turns of the loop later

    asyncio.run(opened())


def seen_by(port: int) -> str:
    return fingerprint_of(ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port))))


def test_a_certificate_of_its_own_is_proven_by_the_token(tmp_path: Path, folder: Path) -> None:
    with run(tmp_path, "coordinator.tls=auto") as coordinator:
        port = coordinator.port
        ask(port, AUTO)
        ask(port, PLAIN)  # on loopback, without options: the port asks for TLS
        found = seen_by(port)
        ask(port, trust_for("127.0.0.1", tls="SHA256:".lower() + found.upper()))
        with pytest.raises(CoordinatorUnproven, match=f"its certificate is sha256:{found}, expected sha256:0000"):
            ask(port, trust_for("127.0.0.1", tls="sha256:" + "0" * 64))
        with pytest.raises(CoordinatorUnproven, match=rf"its certificate is not signed by the CA in {folder}/ca.pem"):
            ask(port, trust_for("127.0.0.1", tls=str(folder / "ca.pem")))
        with pytest.raises(CoordinatorUnproven, match="it speaks TLS; expected tls=auto, and not plaintext"):
            ask(port, trust_for("127.0.0.1", plaintext=True))
        status, output = coordinator.stop()
    assert status == 0
    assert f"links_encrypted certificate=sha256:{found}" in output
    assert "Traceback" not in output


def test_a_ca_decides_by_signature_and_name(tmp_path: Path, folder: Path) -> None:
    trust = trust_for("localhost", tls=str(folder / "ca.pem"))
    others = tmp_path / "others"
    write_certificates(others, ["localhost"], [], YEAR)
    with run(tmp_path, f"coordinator.tls={folder}/coordinator.pem") as coordinator:
        ask(coordinator.port, trust, "localhost")
        ask(coordinator.port, AUTO)
        with pytest.raises(CoordinatorUnproven, match=r"its certificate is not for 127\.0\.0\.1: make one with --host"):
            ask(coordinator.port, trust)
        with pytest.raises(CoordinatorUnproven, match=r"not signed by the CA in .*/others/ca\.pem"):
            ask(coordinator.port, trust_for("localhost", tls=str(others / "ca.pem")), "localhost")


def test_dates_of_a_certificate_count(tmp_path: Path, folder: Path) -> None:
    ca = load_ca(folder / "ca.pem", folder / "ca.key")
    trust = trust_for("localhost", tls=str(folder / "ca.pem"))
    expired = _shifted(ca, -YEAR)
    for name, made, said in (
        ("expired", expired, "its certificate has expired: make a new one"),
        ("early", _shifted(ca, YEAR), "its certificate is not valid yet: compare the clocks"),
    ):
        path = tmp_path / f"{name}.pem"
        path.write_bytes(made.pem)
        with run(tmp_path / name, f"coordinator.tls={path}") as coordinator:
            with pytest.raises(CoordinatorUnproven, match=said):
                ask(coordinator.port, trust, "localhost")
            ask(coordinator.port, AUTO)  # the proof does not go by dates


def _shifted(ca: Issued, by: datetime.timedelta) -> Issued:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    made = issue("x", YEAR / 2, ca=ca, hosts=["localhost"])
    found = made.certificate
    builder = x509.CertificateBuilder(
        found.issuer, found.subject, found.public_key(), found.serial_number,
        found.not_valid_before_utc + by, found.not_valid_after_utc + by, list(found.extensions),
    )  # fmt: skip
    return Issued(certificate=builder.sign(ca.key, hashes.SHA256()), key=made.key)


def test_clients_prove_themselves_where_that_is_asked(tmp_path: Path, folder: Path) -> None:
    strangers = tmp_path / "strangers"
    write_certificates(strangers, [], ["eve"], YEAR)
    given = (f"coordinator.tls={folder}/coordinator.pem", f"coordinator.tls_client_ca={folder}/ca.pem")
    with run(tmp_path, *given) as coordinator:
        ask(coordinator.port, trust_for("127.0.0.1", tls="auto", client=str(folder / "client-me.pem")))
        with pytest.raises(CoordinatorUnproven, match="perhaps a certificate of its clients is expected in tls_cl"):
            ask(coordinator.port, AUTO)
        with pytest.raises(CoordinatorUnproven, match=r"perhaps .*/client-eve\.pem is not accepted"):
            ask(coordinator.port, trust_for("127.0.0.1", tls="auto", client=str(strangers / "client-eve.pem")))


def test_a_plain_port_is_named(tmp_path: Path) -> None:
    with run(tmp_path) as coordinator:
        ask(coordinator.port, PLAIN)
        with pytest.raises(CoordinatorUnproven, match="it does not speak TLS: expected a coordinator that does"):
            ask(coordinator.port, AUTO)


async def test_agents_train_over_tls(tmp_path: Path) -> None:
    with run(tmp_path, "coordinator.tls=auto") as coordinator:
        async with connected(coordinator.url, "a", token=SECRET) as (agent,):
            await train([agent])


# ---- in the way


class Middle:
    """Ends the encryption with a certificate of its own, forwards to the true coordinator, and keeps what it reads."""

    def __init__(self, port: int, folder: Path) -> None:
        self.target = port
        self.read = b""
        self.connections = 0
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "coordinator.pem")
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Middle:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with contextlib.suppress(OSError), self._context.wrap_socket(connection, server_side=True) as near:
                self._forward(near)

    def _forward(self, near: ssl.SSLSocket) -> None:
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection(("127.0.0.1", self.target)) as raw, plain.wrap_socket(raw) as far:
            near.settimeout(5)
            while request := near.recv(1 << 16):
                self.read += request
                far.sendall(request)
                near.sendall(far.recv(1 << 16))


@pytest.mark.parametrize("forwarded", [False, True])
def test_who_ends_the_encryption_on_the_way_gets_only_nonces(tmp_path: Path, folder: Path, forwarded: bool) -> None:
    with run(tmp_path, "coordinator.tls=auto") as coordinator, Middle(coordinator.port, folder) as middle:
        access = Access(token=TOKEN, trust=AUTO, forwarded=forwarded)
        with pytest.raises(CoordinatorUnproven, match="is not the coordinator, whose certificate is another"):
            fetch(f"127.0.0.1:{middle.port}", "/v1/status", access)
        with pytest.raises(CoordinatorUnproven, match="is not the coordinator, whose certificate is another"):
            _by_agent(f"127.0.0.1:{middle.port}", AUTO)
    assert middle.connections == 2
    assert middle.read.count(b"GET /v1/challenge?nonce=") == 2
    assert b"Authorization" not in middle.read


def test_a_tunnel_carries_encrypted_links_without_an_option(tmp_path: Path) -> None:
    with run(tmp_path, "coordinator.tls=auto") as coordinator, _tunnel(coordinator.port) as port:
        ask(port, AUTO)


@contextlib.contextmanager
def _tunnel(target: int) -> Iterator[int]:
    async def serve(ready: Callable[[int], None], ended: asyncio.Event) -> None:
        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            carrying.add(asyncio.current_task())
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                with contextlib.suppress(OSError):
                    while data := await source.read(1 << 16):
                        sink.write(data)
                        await sink.drain()
                sink.close()

            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

        server = await asyncio.start_server(carry, "127.0.0.1", 0)
        ready(server.sockets[0].getsockname()[1])
        await ended.wait()
        server.close()
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)

    carrying: set[Any] = set()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()
    ports: list[int] = []
    known = threading.Event()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(serve(lambda port: (ports.append(port), known.set())[0], ended))
    )
    thread.start()
    try:
        assert known.wait(20)
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


# ---- the door


def test_connections_that_shake_no_hands_are_closed(tmp_path: Path) -> None:
    """Silent ones, and one that begins a handshake and stops, are closed in seconds; others are served meanwhile."""
    with run(tmp_path, "coordinator.tls=auto") as coordinator, contextlib.ExitStack() as stack:
        place = ("127.0.0.1", coordinator.port)
        idle = [stack.enter_context(socket.create_connection(place)) for _ in range(3)]
        idle[1].sendall(b"\x16\x03\x01")
        ask(coordinator.port, AUTO)
        begun = time.monotonic()
        for each in idle:
            each.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1 << 10) == b""
        assert time.monotonic() - begun < 60
        assert answers(coordinator.port)


async def test_an_agent_logs_a_wrong_certificate_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def nothing() -> None:
        pass

    def register() -> Any:
        raise AssertionError("it was told of the agent")

    hooks = SessionHooks(
        register=register, received=lambda _: None, nothing_listens=nothing, not_answering=lambda: None
    )
    trust = trust_for("127.0.0.1", tls="sha256:" + "0" * 64)
    with run(tmp_path, "coordinator.tls=auto") as coordinator:
        session = CoordinatorSession(f"{coordinator.url}/v1/agent", Access(token=TOKEN, trust=trust), 1.0, hooks)
        with pytest.raises(CoordinatorUnavailable, match="its certificate is sha256:"):
            await session.run()
    assert len([each for each in caplog.records if "coordinator_unproven" in each.getMessage()]) == 1
