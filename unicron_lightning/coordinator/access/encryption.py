"""Choice of encryption and certificate for the coordinator's links.

Beyond loopback links are encrypted, unless ``coordinator.plaintext`` is set. Without a certificate of the user the
coordinator makes one at each start. Its proof of the token names the certificate (`proof`), so no file has to be
copied.
"""

from __future__ import annotations

import datetime
import logging
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unicron_lightning.coordinator.config.schema import ProcessConfig
from unicron_lightning.errors import ConfigError
from unicron_lightning.tls import AUTO, fingerprint_of, load_pem

logger = logging.getLogger(__name__)

_OWN_LIFETIME: Final = datetime.timedelta(days=3650)
"""Lifetime of a certificate that the coordinator makes: longer than a process lives; clients do not check its dates."""


@dataclass(frozen=True, kw_only=True)
class Encryption:
    """Encryption of connections.

    Attributes:
        context: of the server's side.
        fingerprint: SHA-256 of the certificate.
    """

    context: ssl.SSLContext
    fingerprint: str


def certificate_wanted(config: ProcessConfig, *, loopback: bool) -> str | None:
    """Return ``auto``, the path of a certificate, or None for plain links.

    Args:
        config: the options.
        loopback: whether only this machine can reach the listening address.

    Raises:
        ConfigError: options contradict each other.
    """
    if config.plaintext:
        if config.tls is not None or config.tls_client_ca is not None:
            raise ConfigError(
                "coordinator.plaintext=true: expected neither coordinator.tls nor coordinator.tls_client_ca"
            )
        return None
    if config.tls is None and loopback:
        if config.tls_client_ca is not None:
            raise ConfigError(f"coordinator.tls_client_ca={config.tls_client_ca}: expected coordinator.tls too")
        return None
    return config.tls or AUTO


def encryption_of(config: ProcessConfig, *, loopback: bool) -> Encryption | None:
    """Return the encryption of connections; None if they are plain, with a warning beyond loopback.

    Raises:
        ConfigError: options contradict each other, or a file cannot be used.
    """
    wanted = certificate_wanted(config, loopback=loopback)
    if wanted is None:
        if not loopback:
            logger.warning(
                "links_not_encrypted host=%s: with coordinator.plaintext all but the token can be read and changed on "
                "the way",
                config.host,
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    pem = _make_own(context) if wanted == AUTO else _load(context, Path(wanted).expanduser(), config.tls_key)
    if config.tls_client_ca is not None:
        given = f"coordinator.tls_client_ca={config.tls_client_ca}"
        path = Path(config.tls_client_ca).expanduser()
        load_pem(context.load_verify_locations, path, given, "a CA's certificate (PEM)")
        context.verify_mode = ssl.CERT_REQUIRED
    return Encryption(context=context, fingerprint=fingerprint_of(_first_certificate(pem)))


def _make_own(context: ssl.SSLContext) -> str:
    from unicron_lightning.certificates import issue  # `cryptography`: not for coordinators on loopback

    made = issue("unicron coordinator", _OWN_LIFETIME, ca=None)
    with tempfile.NamedTemporaryFile(prefix="unicron-") as file:  # of mode 0600; OpenSSL takes keys from files only
        file.write(made.pem)
        file.flush()
        context.load_cert_chain(file.name)
    return made.certificate_pem.decode("ascii")


def _load(context: ssl.SSLContext, path: Path, key: str | None) -> str:
    given = f"coordinator.tls={path}" + (f" coordinator.tls_key={key}" if key else "")
    try:
        context.load_cert_chain(path, Path(key).expanduser() if key else None)
        return path.read_text(encoding="ascii", errors="replace")
    except ssl.SSLError:
        raise ConfigError(f"{given}: expected auto, or a certificate with its key (PEM; unicron certs)") from None
    except OSError as error:
        raise ConfigError(f"{given}: {error.strerror or error}") from None


def _first_certificate(pem: str) -> bytes:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    inner = pem.partition(begin)[2].partition(end)[0]
    return ssl.PEM_cert_to_DER_cert(f"{begin}{inner}{end}")
