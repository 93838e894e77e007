"""Makes certificates: a CA, the certificates that it signs, and a coordinator's own.

Keys are ECDSA on P-256. Files are PEM; those with a key have mode 0600.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from unicron_lightning.errors import ConfigError

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_BACKDATED = datetime.timedelta(hours=1)
"""Allowance for clocks of other machines that are behind."""


@dataclass(frozen=True, kw_only=True)
class Issued:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        """Both, as one file."""
        return self.certificate_pem + self.key_pem

    @property
    def certificate_pem(self) -> bytes:
        """The certificate alone."""
        pem: bytes = self.certificate.public_bytes(serialization.Encoding.PEM)
        return pem

    @property
    def key_pem(self) -> bytes:
        """The key alone."""
        pem: bytes = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return pem


def make_ca(name: str, lifetime: datetime.timedelta) -> Issued:
    """Make a CA that signs certificates of ends only."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name, key, lifetime)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    certificate = builder.issuer_name(_name(name)).sign(key, hashes.SHA256())
    return Issued(certificate=certificate, key=key)


def issue(
    name: str, lifetime: datetime.timedelta, *, ca: Issued | None, hosts: Sequence[str] = (), client: bool = False
) -> Issued:
    """Make a certificate for one end.

    Args:
        name: its common name.
        lifetime: time until it expires.
        ca: signs it; None: it is self-signed.
        hosts: names and addresses of a coordinator.
        client: whether it is for a client; otherwise it is for a coordinator.

    Raises:
        ConfigError: a host is neither a name nor an address.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    purpose = ExtendedKeyUsageOID.CLIENT_AUTH if client else ExtendedKeyUsageOID.SERVER_AUTH
    builder = _builder(name, key, lifetime)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(each) for each in hosts]), critical=False)
    signer = key if ca is None else ca.key
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(authority, critical=False)
    builder = builder.issuer_name(_name(name) if ca is None else ca.certificate.subject)
    return Issued(certificate=builder.sign(signer, hashes.SHA256()), key=key)


def load_ca(certificate: Path, key: Path) -> Issued:
    """Read a CA made by `make_ca`.

    Raises:
        ConfigError: a file cannot be read, or is not a CA's.
    """
    try:
        loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
        secret = serialization.load_pem_private_key(key.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "not in PEM"
        raise ConfigError(f"{certificate} and {key}: expected a CA's certificate and its key: {reason}") from None
    if not isinstance(secret, ec.EllipticCurvePrivateKey) or secret.public_key() != loaded.public_key():
        raise ConfigError(f"{key}: expected the key of {certificate}")
    return Issued(certificate=loaded, key=secret)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read; readers see either the old or the new content.

    Raises:
        ConfigError: the file cannot be written.
    """
    _write(path, content, 0o600)


def write_public(path: Path, content: bytes) -> None:
    """Write a file that all may read, atomically as well."""
    _write(path, content, 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            partial.replace(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                partial.unlink()
            raise
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror or error}") from None


def _builder(name: str, key: ec.EllipticCurvePrivateKey, lifetime: datetime.timedelta) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not _HOST.fullmatch(host):
        raise ConfigError(f"--host {host!r}: expected a host's name or address")
    return x509.DNSName(host)
