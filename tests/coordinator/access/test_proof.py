"""The mutual proof: accepted once and in time; neither end is trusted without it."""

from __future__ import annotations

import json

import pytest

from unicron_lightning.credentials import Token
from unicron_lightning.errors import CoordinatorUnproven
from unicron_lightning.proof import (
    CHALLENGE_SECONDS,
    Challenges,
    Claim,
    Transcript,
    answer_proof,
    authorization,
    check_coordinator,
    coordinator_proof,
    new_nonce,
    parse_authorization,
)
from unicron_lightning.tls import address_of

HERE = "[127.0.0.1]:1@m"
TOKEN = Token(secret="secret", origin="a test")


def claim(challenges: Challenges, secret: str = "secret", at: float = 0.0, target: str = "/v1/status") -> Claim:
    client = new_nonce()
    transcript = Transcript(client=client, server=challenges.issue(client, at), address=HERE)
    found = parse_authorization(authorization(secret, transcript, "GET", target))
    assert found is not None
    return found


def accepted(challenges: Challenges, shown: Claim, now: float = 1.0, address: str = HERE, **changes: object) -> bool:
    request = {"method": "GET", "target": "/v1/status", "body": b"", **changes}
    return challenges.accept("secret", shown, address, now=now, **request)  # type: ignore[arg-type]


def test_a_challenge_is_accepted_once() -> None:
    challenges = Challenges(b"k")
    shown = claim(challenges)
    assert accepted(challenges, shown)
    assert not accepted(challenges, shown), "replayed"
    assert accepted(challenges, claim(challenges)), "another one"


def test_a_challenge_expires_and_is_forgotten_then() -> None:
    challenges = Challenges(b"k")
    used, unused = claim(challenges), claim(challenges)
    assert accepted(challenges, used)
    assert not accepted(challenges, unused, now=CHALLENGE_SECONDS + 0.1)
    assert not challenges._used
    assert not accepted(challenges, used, now=CHALLENGE_SECONDS + 0.1)


@pytest.mark.parametrize(
    "change",
    [{"method": "POST"}, {"target": "/v1/status?x=1"}, {"body": b"{}"}, {"address": "[127.0.0.2]:1@m"}],
)
def test_it_is_for_one_request_at_one_address(change: dict[str, object]) -> None:
    challenges = Challenges(b"k")
    shown = claim(challenges)
    assert not accepted(challenges, shown, **change)  # type: ignore[arg-type]
    assert accepted(challenges, shown), "a wrong request does not use it up"


def test_another_token_process_or_nonce_is_refused() -> None:
    challenges, restarted = Challenges(b"k"), Challenges(b"l")
    assert not accepted(challenges, claim(challenges, secret="wrong"))
    assert not accepted(restarted, claim(challenges))
    shown = claim(challenges)
    stolen = Transcript(client=new_nonce(), server=shown.server, address=HERE)
    forged = parse_authorization(authorization("secret", stolen, "GET", "/v1/status"))
    assert forged is not None
    assert not accepted(challenges, forged), "a challenge is for the nonce that asked for it"


@pytest.mark.parametrize("header", ["", "Bearer secret", "Unicron a:b:c", f"Unicron {'0' * 64}:{'g' * 112}:{'0' * 64}"])
def test_other_headers_are_no_claims(header: str) -> None:
    assert parse_authorization(header) is None


def test_what_was_never_issued_is_refused() -> None:
    challenges = Challenges(b"k")
    for server in ("0" * 112, "f" * 112, "x"):
        assert not accepted(challenges, Claim(client="0" * 64, server=server, proof="0" * 64))


def answer(client: str, secret: str = "secret", address: str = HERE) -> bytes:
    transcript = Transcript(client=client, server="s", address=address)
    return json.dumps({"nonce": "s", "address": address, "proof": coordinator_proof(secret, transcript)}).encode()


def test_a_coordinator_is_believed_by_its_proof_alone() -> None:
    client = new_nonce()
    assert check_coordinator("h:1", TOKEN, client, answer(client), HERE, forwarded=False).server == "s"
    repeated = answer(new_nonce())
    echo = json.dumps({"nonce": client, "address": HERE, "proof": client}).encode()
    for wrong in (answer(client, "wrong"), repeated, echo, b"", b"[]", b"1", b'{"nonce": 1}', b"\xff", b"[" * 5000):
        with pytest.raises(CoordinatorUnproven, match="what answers at h:1 cannot prove that it knows the token"):
            check_coordinator("h:1", TOKEN, client, wrong, HERE, forwarded=False)


def test_one_that_forwards_is_found_out_unless_it_is_meant() -> None:
    client, there = new_nonce(), "[10.0.0.1]:2"
    with pytest.raises(CoordinatorUnproven, match=r"forwards to a coordinator at \[10\.0\.0\.1\]:2"):
        check_coordinator("h:1", TOKEN, client, answer(client, address=there), HERE, forwarded=False)
    assert check_coordinator("h:1", TOKEN, client, answer(client, address=there), HERE, forwarded=True)


def test_proofs_of_one_purpose_are_none_of_another() -> None:
    transcript = Transcript(client="c", server="s", address="a")
    proofs = {
        coordinator_proof("k", transcript),
        answer_proof("k", transcript, 200, b""),
        answer_proof("k", transcript, 20, b"0"),
    }
    moved = Transcript(client="cs", server="", address="a")
    assert len(proofs | {coordinator_proof("k", moved), authorization("k", transcript, "GET", "/")[-64:]}) == 5


def test_addresses_are_written_one_way() -> None:
    assert address_of(("::ffff:10.0.0.1", 5, 0, 0)) == address_of(("10.0.0.1", 5)) == "[10.0.0.1]:5"
    assert address_of(("fe80::1%eth0", 5, 0, 2)) == "[fe80::1]:5"
    assert address_of(("127.0.0.1", 5)).startswith("[127.0.0.1]:5@"), "every machine has one"
    assert address_of(("127.0.0.1", 5)) != address_of(("::1", 5, 0, 0))
