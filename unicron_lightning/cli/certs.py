"""``unicron certs``: a CA, and certificates that it signs."""

from __future__ import annotations

import argparse
import datetime
import re
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from unicron_lightning.errors import ConfigError
from unicron_lightning.tls import CA_FILE, COORDINATOR_FILE, fingerprint_of

_CA_KEY: Final = "ca.key"
_CA_LIFETIME: Final = datetime.timedelta(days=3650)
_CLIENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MOST_DAYS: Final = 3650


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``unicron``."""
    certs = commands.add_parser("certs", help="make a CA, and certificates for a coordinator and its clients")
    certs.add_argument("dir", metavar="DIR", help="where its files go; a CA that is there already is used")
    certs.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help="name or address at which the coordinator is reached; may be given again; default: this machine's",
    )
    certs.add_argument(
        "--client",
        action="append",
        default=[],
        metavar="NAME",
        help="make a client's certificate, client-NAME.pem; alone it leaves the coordinator's as it is",
    )
    certs.add_argument("--days", type=int, default=365, metavar="N", help="until they expire; default: %(default)s")
    certs.set_defaults(run=_certs)


def _certs(options: argparse.Namespace) -> int:
    if not 1 <= options.days <= _MOST_DAYS:
        raise ConfigError(f"--days {options.days}: expected 1 to {_MOST_DAYS}")
    for name in options.client:
        if not _CLIENT.fullmatch(name):
            raise ConfigError(f"--client {name!r}: expected letters, digits, '.', '_' and '-'")
    folder = Path(options.dir).expanduser().absolute()
    made = write_certificates(folder, options.host, options.client, datetime.timedelta(days=options.days))
    for path, what in made:
        print(f"{path}  {what}")
    print(f"coordinator: coordinator.tls={folder / COORDINATOR_FILE}")
    print(f"clients:     --tls {folder / CA_FILE}, or --rdzv-conf tls={folder / CA_FILE}")
    return 0


def write_certificates(
    folder: Path, hosts: Sequence[str], clients: Sequence[str], lifetime: datetime.timedelta
) -> list[tuple[Path, str]]:
    """Write the files into a folder.

    Args:
        folder: created with mode 0700 if it does not exist.
        hosts: names and addresses of the coordinator; empty: this machine's names and loopback addresses.
        clients: names of clients that get a certificate.
        lifetime: of all certificates but the CA's.

    Returns:
        Each written file, with a description.

    Raises:
        ConfigError: a file cannot be read or written, or a host is invalid.
    """
    from unicron_lightning.certificates import issue, load_ca, make_ca, write_private, write_public

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"can't make {folder}: {error.strerror or error}") from None
    made: list[tuple[Path, str]] = []
    certificate, key = folder / CA_FILE, folder / _CA_KEY
    if certificate.exists() or key.exists():
        ca = load_ca(certificate, key)
    else:
        ca = make_ca("unicron CA", _CA_LIFETIME)
        write_private(key, ca.key_pem)
        write_public(certificate, ca.certificate_pem)
        made += [(certificate, "the CA, which clients trust"), (key, "its key: keep it where certificates are made")]
    path = folder / COORDINATOR_FILE
    if hosts or not clients or not path.exists():
        names = list(dict.fromkeys(hosts or _own_names()))
        issued = issue("unicron coordinator", lifetime, ca=ca, hosts=names)
        write_private(path, issued.pem)
        fingerprint = fingerprint_of(ssl.PEM_cert_to_DER_cert(issued.certificate_pem.decode("ascii")))
        made.append((path, f"the coordinator's, with its key, for {', '.join(names)}; sha256:{fingerprint}"))
    for name in clients:
        path = folder / f"client-{name}.pem"
        write_private(path, issue(name, lifetime, ca=ca, client=True).pem)
        made.append((path, f"that of the client {name}, with its key"))
    return made


def _own_names() -> list[str]:
    return list(dict.fromkeys([socket.gethostname(), socket.getfqdn(), "localhost", "127.0.0.1", "::1"]))
