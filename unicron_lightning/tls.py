"""Encryption of the links to a coordinator: the certificate that a client accepts, and the errors for others.

Every client has a `Trust`. Without options it follows from the endpoint: on a loopback address the link is plain,
unless the port requires TLS; on any other address it is TLS. The certificate is accepted for one of these reasons:

- ``auto``: the coordinator proves the token, and its proof names its certificate (`proof`). No file has to be copied.
- a CA: the certificate is signed by it, is valid now, and contains the endpoint's name.
- a fingerprint: the certificate has this SHA-256.

With a CA or a fingerprint the proof of the token is required as well. TLS is 1.3 or newer.

`address_of` is the address of a connection's end as text that both ends compute independently.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import logging
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from unicron_lightning.credentials import Token, is_loopback, token_for
from unicron_lightning.errors import ConfigError, CoordinatorUnproven

logger = logging.getLogger(__name__)


def address_of(end: Any) -> str:
    """Return the address of a socket's end, given as by `socket.getsockname` or `getpeername`.

    Loopback addresses exist on every machine, so a mark of the machine is added to them.
    """
    address = ipaddress.ip_address(str(end[0]).partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    text = f"[{address}]:{end[1]}"
    return f"{text}@{_machine()}" if address.is_loopback else text


@functools.lru_cache(maxsize=1)
def _machine() -> str:
    """Return a mark of this boot of the machine and of this network namespace, the same for all users."""
    boot = _read(lambda: Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    namespace = _read(lambda: str(Path("/proc/self/ns/net").readlink()))
    return hashlib.sha256(f"{boot}|{namespace}".encode()).hexdigest()[:16]


def _read(read: Callable[[], str]) -> str:
    try:
        return read().strip()
    except OSError:
        return ""


AUTO: Final = "auto"
CA_FILE: Final = "ca.pem"
COORDINATOR_FILE: Final = "coordinator.pem"
"""File in the folder of `unicron certs`: the coordinator's certificate with its key. `CA_FILE` is the CA's
certificate.
"""
_FINGERPRINT: Final = re.compile(r"sha256:([0-9a-f]{64})")
_EXPECTED: Final = "expected auto, the path of a CA's certificate, or sha256: and 64 hexadecimal digits"
_EXPIRED: Final = 10
_NOT_YET: Final = 9
_NAMES: Final = (62, 64)
"""OpenSSL's error codes for a name and for an address that the certificate does not contain."""
_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")


@dataclass(frozen=True, kw_only=True)
class Trust:
    """A client's requirements on the link to its coordinator.

    Attributes:
        encrypted: whether the link is TLS.
        may_encrypt: whether a plain link becomes TLS if the port requires it.
        ca: file of the CA that must have signed the coordinator's certificate.
        fingerprint: SHA-256 that the certificate must have, 64 hexadecimal digits.
        client: file with this client's own certificate and key, for a coordinator that requires one.
        option: name of the user's option ``tls``, for messages.
    """

    encrypted: bool
    may_encrypt: bool = False
    ca: Path | None = None
    fingerprint: str | None = None
    client: Path | None = None
    option: str = "tls="

    @property
    def scheme(self) -> str:
        """Scheme of URLs."""
        return "https" if self.encrypted else "http"


PLAIN: Final = Trust(encrypted=False, may_encrypt=True)
"""The trust of a client of a loopback address without options."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """A client's access to its coordinator.

    Attributes:
        token: the shared secret.
        forwarded: whether a process forwards from the endpoint to the coordinator.
        trust: whether the link is encrypted, and which certificate is accepted.
    """

    token: Token
    forwarded: bool = False
    trust: Trust = PLAIN

    @property
    def encrypted(self) -> Access:
        """The access by TLS to a port that has required it, on a link that may be plain."""
        return replace(self, trust=replace(self.trust, encrypted=True, may_encrypt=False))


@dataclass(kw_only=True)
class AccessOptions:
    """A user's options for the access to a coordinator. Not frozen: Hydra overrides the values of a subclass."""

    token_file: str | None = None
    """File with the coordinator's token; None: the variable UNICRON_TOKEN, else the file made for the user."""
    forwarded: bool = False
    """Whether a process, e.g. a tunnel, forwards from the endpoint to the coordinator."""
    tls: str | None = None
    """Certificate that is accepted: a CA's file, ``sha256:FINGERPRINT``, or auto; None: auto beyond loopback."""
    tls_client: str | None = None
    """File with this client's certificate and its key, for a coordinator that asks for one."""
    plaintext: bool = False
    """Whether the link may be plain beyond loopback."""

    def access(self, host: str, token_option: str, tls_option: str) -> Access:
        """Determine the access to the coordinator at ``host``.

        Args:
            host: as the user wrote it.
            token_option: form of the user's option for ``token_file``, for messages, e.g. ``--token-file ``.
            tls_option: form of that for ``tls``.

        Raises:
            ConfigError: there is no token, a value is wrong, or a file cannot be used.
        """
        token = token_for(host, self.token_file, option=token_option)
        trust = trust_for(host, tls=self.tls, client=self.tls_client, plaintext=self.plaintext, option=tls_option)
        return Access(token=token, forwarded=self.forwarded, trust=trust)


class TlsExpected(CoordinatorUnproven):
    """The port speaks TLS, the client did not."""


class _WrongCertificate(ssl.SSLError):
    """The other end's certificate differs from the expected one."""


def trust_for(
    host: str, *, tls: str | None = None, client: str | None = None, plaintext: bool = False, option: str = "tls="
) -> Trust:
    """Determine a client's trust in a coordinator at ``host``.

    Args:
        host: as the user wrote it.
        tls: ``auto``, a CA's file, or a fingerprint; None: by the host.
        client: file with the client's certificate and key.
        plaintext: whether a link beyond this machine may be plain.
        option: form of the user's option for ``tls``, for messages, e.g. ``--tls ``.

    Raises:
        ConfigError: a value is wrong, contradicts another, or a file cannot be used.
    """
    if plaintext and (tls is not None or client is not None):
        raise ConfigError(f"{option}{tls or client} and plaintext: expected one of them, not both")
    if plaintext:
        if not is_loopback(host):
            logger.warning("link_not_encrypted host=%s: all but the token can be read and changed on the way", host)
        return Trust(encrypted=False, option=option)
    if tls is None and client is None and is_loopback(host):
        return Trust(encrypted=False, may_encrypt=True, option=option)
    trust = _named(tls, Path(client).expanduser().absolute() if client else None, option)
    client_context(trust)  # reads the files, so that an invalid one is reported at once
    return trust


def _named(tls: str | None, client: Path | None, option: str) -> Trust:
    if tls is None or tls == AUTO:
        return Trust(encrypted=True, client=client, option=option)
    if tls.startswith("sha256:"):
        found = _FINGERPRINT.fullmatch("sha256:" + tls.removeprefix("sha256:").replace(":", "").lower())
        if found is None:
            raise ConfigError(f"{option}{tls}: {_EXPECTED}")
        return Trust(encrypted=True, fingerprint=found[1], client=client, option=option)
    path = Path(tls).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"{option}{tls}: no such file; {_EXPECTED}")
    return Trust(encrypted=True, ca=path, client=client, option=option)


def fingerprint_of(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate in DER, as 64 hexadecimal digits."""
    return hashlib.sha256(certificate).hexdigest()


def name_of(fingerprint: str) -> str:
    """Return the text in the proof of the token that replaces an address on a TLS link."""
    return f"tls:{fingerprint}"


class Certificate:
    """The certificate of the coordinator's end, the same on all connections of one attempt.

    Args:
        trust: requirements on the certificate.
    """

    def __init__(self, trust: Trust) -> None:
        self._pinned = trust.fingerprint
        self.seen: str | None = None

    @property
    def name(self) -> str:
        """The certificate's name in the proof."""
        assert self.seen is not None, "no connection was made"
        return name_of(self.seen)

    def check(self, shown: bytes | None) -> None:
        """Compare the certificate of a connection, before anything is sent over it.

        Raises:
            _WrongCertificate: the certificate differs.
        """
        found = fingerprint_of(shown or b"")
        if self._pinned is not None and found != self._pinned:
            raise _WrongCertificate(f"its certificate is sha256:{found}, expected sha256:{self._pinned}")
        if self.seen is not None and found != self.seen:
            raise _WrongCertificate("its certificate has changed between two connections")
        self.seen = found


def client_context(trust: Trust, certificate: Certificate | None = None) -> ssl.SSLContext:
    """Return the context of a client's connections.

    Args:
        trust: the client's requirements.
        certificate: checks each connection at the end of its handshake.

    Raises:
        ConfigError: a file of ``trust`` cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if trust.ca is not None:
        load_pem(context.load_verify_locations, trust.ca, f"{trust.option}{trust.ca}", "a CA's certificate (PEM)")
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # the fingerprint or the proof of the token decides
    if trust.client is not None:
        wanted = "a certificate and its key in one file (PEM)"
        load_pem(context.load_cert_chain, trust.client, f"{_client_option(trust)}{trust.client}", wanted)
    if certificate is not None:
        context.sslobject_class, context.sslsocket_class = _checked(certificate)
    return context


def _checked(certificate: Certificate) -> tuple[type[ssl.SSLObject], type[ssl.SSLSocket]]:
    class CheckedObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            certificate.check(self.getpeercert(binary_form=True))

    class CheckedSocket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            certificate.check(self.getpeercert(binary_form=True))

    return CheckedObject, CheckedSocket


def load_pem(load: Callable[[Path], object], path: Path, given: str, expected: str) -> None:
    """Load a file into a context.

    Args:
        load: the context's method.
        path: the file.
        given: the user's option with its value, for messages.
        expected: the content of a valid file, for messages.

    Raises:
        ConfigError: the file cannot be read, or has other content.
    """
    try:
        load(path)
    except ssl.SSLError:
        raise ConfigError(f"{given}: expected {expected}") from None
    except OSError as error:
        raise ConfigError(f"{given}: {error.strerror or error}") from None


def ssl_error_in(error: BaseException | None) -> ssl.SSLError | None:
    """Return the TLS error that caused a library's error, if any."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        # aiohttp's own errors are also of this class, but have no reason.
        inner = getattr(error, "os_error", None) or getattr(error, "certificate_error", None)
        if inner is None and isinstance(error, ssl.SSLError):
            return error
        error = inner if isinstance(inner, BaseException) else error.__cause__ or error.__context__
    return None


def explained(endpoint: str, error: ssl.SSLError, trust: Trust) -> CoordinatorUnproven:
    """Return the one-line error of a failed TLS connection."""
    if isinstance(error, _WrongCertificate):
        said = str(error.args[0])
    elif isinstance(error, ssl.SSLCertVerificationError):
        said = _unverified(endpoint, error, trust)
    else:
        said = _not_agreed(str(error.reason or error))
    return CoordinatorUnproven(f"what answers at {endpoint}: {said}")


def tls_expected(endpoint: str, trust: Trust) -> TlsExpected:
    """Return the error of a plain request to a port that speaks TLS."""
    return TlsExpected(f"what answers at {endpoint}: it speaks TLS; expected {trust.option}auto, and not plaintext")


def hung_up(endpoint: str, trust: Trust) -> CoordinatorUnproven:
    """Return the error of a TLS connection that ended before the first answer.

    A coordinator closes the connection of a client whose certificate it does not accept in this way, without a reason.
    """
    if trust.client is None:
        said = (
            f"a certificate of its clients is expected in {_client_option(trust)}PATH (unicron certs DIR --client NAME)"
        )
    else:
        said = f"{trust.client} is not accepted: expected a certificate of the CA in its coordinator.tls_client_ca"
    return CoordinatorUnproven(f"what answers at {endpoint}: it ends the connection without an answer; perhaps {said}")


def _not_agreed(reason: str) -> str:
    if any(each in reason for each in _NOT_TLS):
        return (
            "it does not speak TLS: expected a coordinator that does (coordinator.tls=auto, default beyond loopback) "
            "or the option plaintext, for a link that can be read and changed on the way"
        )
    return f"no TLS connection could be made: {reason}"


def _unverified(endpoint: str, error: ssl.SSLCertVerificationError, trust: Trust) -> str:
    if error.verify_code == _EXPIRED:
        return "its certificate has expired: make a new one (unicron certs) and restart the coordinator"
    if error.verify_code == _NOT_YET:
        return "its certificate is not valid yet: compare the clocks of both machines"
    if error.verify_code in _NAMES:
        return f"its certificate is not for {endpoint.rpartition(':')[0]}: make one with --host (unicron certs)"
    return f"its certificate is not signed by the CA in {trust.ca} ({error.verify_message})"


def _client_option(trust: Trust) -> str:
    return trust.option.replace("tls", "tls-client" if trust.option.endswith(" ") else "tls_client")
