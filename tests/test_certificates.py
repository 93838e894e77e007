"""``unicron certs``: the files, and their use."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from unicron_lightning.cli import main


def certs(folder: Path, *words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["certs", str(folder), *words])
    return int(ended.value.code or 0)


def loaded(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def verified(leaf: Path, ca: Path, host: str) -> None:
    policy = PolicyBuilder().store(Store([loaded(ca)]))
    policy.build_server_verifier(x509.DNSName(host)).verify(loaded(leaf), [])


def test_a_ca_signs_a_coordinator_for_its_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tls"
    assert certs(folder, "--host", "node0.example", "--host", "192.0.2.7", "--host", "::1") == 0
    verified(folder / "coordinator.pem", folder / "ca.pem", "node0.example")
    with pytest.raises(VerificationError):
        verified(folder / "coordinator.pem", folder / "ca.pem", "node1.example")
    names = loaded(folder / "coordinator.pem").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "::1"]
    said = capsys.readouterr().out
    assert f"coordinator.tls={folder}/coordinator.pem" in said
    assert re.search(r"sha256:[0-9a-f]{64}", said)


def test_keys_are_of_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    assert certs(folder, "--client", "alice") == 0
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, "coordinator.pem": 0o600, "client-alice.pem": 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_ca_that_is_there_is_used_again(tmp_path: Path) -> None:
    assert certs(tmp_path, "--host", "a") == 0
    before = {name: (tmp_path / name).read_bytes() for name in ("ca.pem", "ca.key", "coordinator.pem")}
    assert certs(tmp_path, "--client", "bob") == 0
    assert {name: (tmp_path / name).read_bytes() for name in before} == before, "a client's alone"
    assert certs(tmp_path, "--host", "a", "--days", "2") == 0
    assert (tmp_path / "ca.pem").read_bytes() == before["ca.pem"]
    renewed = loaded(tmp_path / "coordinator.pem")
    assert renewed.public_bytes != before["coordinator.pem"]
    assert 1 <= (renewed.not_valid_after_utc - renewed.not_valid_before_utc).days <= 3
    verified(tmp_path / "coordinator.pem", tmp_path / "ca.pem", "a")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--days", "0"], "--days 0: expected 1 to 3650"),
        (["--client", "../x"], "--client '../x': expected letters"),
        (["--host", "a b\u00ff."], "expected a host's name or address"),
    ],
)
def test_wrong_words(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert certs(tmp_path / "tls", *words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_key_of_another_ca_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        assert certs(tmp_path / name) == 0
    (tmp_path / "one" / "ca.key").write_bytes((tmp_path / "two" / "ca.key").read_bytes())
    assert certs(tmp_path / "one") == 2
    (tmp_path / "one" / "ca.key").write_text("no key")
    assert certs(tmp_path / "one") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/one/ca.key: expected the key of" in first
    assert "expected a CA's certificate and its key: not in PEM" in second
