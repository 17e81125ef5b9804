from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.model.errors import KeyUnusableError
from backupd.transfer.records.keyring import resolve_recipients, secret_fingerprints
from tests.support.keys import copy_public, gpg, make_home, make_key, stop_agent
from tests.support.stores.folders import short_directory
from tests.support.stores.homes import NewHome


@dataclass(frozen=True)
class Ring:
    home: Path
    now: datetime
    good: str
    expiring: str
    revoked: str
    disabled: str
    signing: str


@pytest.fixture(scope="module")
def ring() -> Iterator[Ring]:
    with short_directory("bt-ring-") as base:
        home = make_home(base / "h")
        good = make_key(home, "good@example.com")
        expiring = make_key(home, "soon@example.com", expires="20d")
        revoked = make_key(home, "gone@example.com")
        certificate = (home / "openpgp-revocs.d" / f"{revoked}.rev").read_bytes()
        gpg(home, "--import", stdin=certificate.replace(b":-----BEGIN", b"-----BEGIN"))
        disabled = make_key(home, "off@example.com")
        gpg(home, "--command-fd", "0", "--edit-key", disabled, stdin=b"disable\nquit\n")
        signing = make_key(home, "sign@example.com", encryption=False)
        for _ in range(2):
            make_key(home, "twin@example.com")
        yield Ring(home, datetime.now(UTC), good, expiring, revoked, disabled, signing)
        stop_agent(home)


def test_a_good_key_is_found_by_every_kind_of_name(ring: Ring) -> None:
    spaced = " ".join(ring.good[n : n + 4] for n in range(0, 40, 4))
    for name in (
        ring.good,
        ring.good.lower(),
        f"0x{ring.good}",
        spaced,
        ring.good[-16:],
        "good@example.com",
        "GOOD@example.com",
        "<good@example.com>",
    ):
        (found,) = resolve_recipients(ring.home, [name], now=ring.now)
        assert (found.fingerprint, found.problem, found.warning) == (ring.good, None, None), name
        assert found.expires_at is None
        assert found.user_ids == ("Operations <good@example.com>",)
        assert found.name == name


def test_a_subkey_names_its_key(ring: Ring) -> None:
    listed = gpg(ring.home, "--with-colons", "--with-subkey-fingerprint", "--list-keys", ring.good).decode()
    subkey = listed.split("fpr:::::::::")[2].split(":")[0]
    assert resolve_recipients(ring.home, [subkey], now=ring.now)[0].fingerprint == ring.good


def test_every_problem_is_told_at_once(ring: Ring) -> None:
    names = [
        "nobody@example.com",
        ring.revoked,
        ring.disabled,
        ring.signing,
        "twin@example.com",
        ring.good[-8:],
        "example.com",
        "A" * 40,
    ]
    words = [
        "no public key",
        "revoked",
        "disabled",
        "no encryption key",
        "fits 2 keys",
        "short key id",
        "fits 7 keys",
        "no public key",
    ]
    found = resolve_recipients(ring.home, names, now=ring.now)
    for info, name, word in zip(found, names, words, strict=True):
        assert info.problem is not None
        assert word in info.problem, info
        assert name in info.problem


def test_expiry_is_judged_by_the_moment_given(ring: Ring) -> None:
    (soon,) = resolve_recipients(ring.home, [ring.expiring], now=ring.now)
    assert soon.problem is None
    assert soon.expires_at is not None
    assert abs(soon.expires_at - ring.now - timedelta(days=20)) < timedelta(hours=1)
    assert soon.warning is not None
    assert "expires on" in soon.warning
    (calm,) = resolve_recipients(ring.home, [ring.expiring], now=ring.now, warn_days=10)
    assert calm.warning is None
    (later,) = resolve_recipients(ring.home, [ring.expiring], now=ring.now + timedelta(days=21))
    assert later.problem is not None
    assert "has expired on" in later.problem
    assert later.warning is None


def test_a_part_of_an_address_is_not_the_address(ring: Ring) -> None:
    assert resolve_recipients(ring.home, ["ood@example.com"], now=ring.now)[0].problem is not None


def test_secret_keys_are_told_from_public_ones(ring: Ring, new_home: NewHome) -> None:
    assert {ring.good, ring.expiring} <= secret_fingerprints(ring.home)
    assert ring.signing not in secret_fingerprints(ring.home)
    public = new_home("p")
    copy_public(ring.home, public, "good@example.com")
    assert secret_fingerprints(public) == frozenset()
    assert resolve_recipients(public, [ring.good], now=ring.now)[0].problem is None


def test_a_missing_home_is_an_error_and_an_empty_one_has_no_keys(tmp_path: Path, new_home: NewHome) -> None:
    with pytest.raises(KeyUnusableError, match="does not exist"):
        resolve_recipients(tmp_path / "nowhere", ["x"], now=datetime.now(UTC))
    empty = new_home("empty")
    (found,) = resolve_recipients(empty, ["x@example.com"], now=datetime.now(UTC))
    assert found.problem == "no public key for x@example.com: import it with gpg --import"
