"""Signatures of the documents of record: nothing unsigned, altered, or signed by somebody else is believed."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import pytest

from backupd.model.errors import DamagedError, DestinationError, KeyUnusableError, ObjectMissingError, ToolMissingError
from backupd.model.manifest import Header
from backupd.transfer import log_segments
from backupd.transfer.fsck import Invariant, examine
from backupd.transfer.records.authenticity import SignedDestination, Signing, problem_of, sign
from backupd.transfer.records.manifests import load_header, read
from storage import layout
from storage.destination import Destination, ObjectInfo, as_tree
from storage.throttle_and_breaker import ForwardingDestination
from tests.contract.destination import TreeContract
from tests.support.keys import copy_public, gpg, make_home, make_key, stop_agent
from tests.support.logs.log_store import BRANCH
from tests.support.stores.folders import short_directory
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import START, FakeClock, Stock, backup_id, commit_header, put

SERVER = "shop"


@dataclass(frozen=True)
class Signers:
    """``signer`` and ``other`` can sign in ``home``; ``public`` knows their public halves, ``ignorant`` nobody's."""

    home: Path
    public: Path
    ignorant: Path
    signer: str
    other: str

    def signing(self, *trusted: str) -> Signing:
        return Signing(self.home, self.signer, trusted or (self.signer,))


@pytest.fixture(scope="module")
def signers() -> Iterator[Signers]:
    with short_directory("bt-sign-") as base:
        home, public, ignorant = (make_home(base / name) for name in ("home", "public", "ignorant"))
        try:
            found = Signers(
                home,
                public,
                ignorant,
                make_key(home, "signer@example.com", encryption=False),
                make_key(home, "other@example.com", encryption=False),
            )
            for user in ("signer@example.com", "other@example.com"):
                copy_public(home, public, user)
            yield found
        finally:
            for one in (home, public, ignorant):
                stop_agent(one)


@pytest.fixture
def bucket() -> MemoryDestination:
    return MemoryDestination("offsite")


@pytest.fixture
def signed(bucket: MemoryDestination, signers: Signers) -> SignedDestination:
    return SignedDestination(bucket, signers.signing(), {SERVER}.__contains__)


class TestSigned(TreeContract):
    """What is no document of record passes through as anywhere."""

    @pytest.fixture
    def destination(self, bucket: MemoryDestination, signers: Signers) -> SignedDestination:
        return SignedDestination(bucket, signers.signing(), {"another"}.__contains__)

    @pytest.fixture
    def bare(self, signers: Signers) -> SignedDestination:
        return SignedDestination(MemoryDestination("m", initialised=False), signers.signing(), {"another"}.__contains__)


def key_of(number: int) -> str:
    return layout.manifest_key(SERVER, backup_id(number))


def why(destination: Destination, number: int = 1) -> str:
    """Why a manifest is not believed; "" when it is."""
    found = read(destination, SERVER, backup_id(number))
    assert found is not None
    return "" if isinstance(found.header, Header) else found.header.detail


def test_a_manifest_is_put_behind_its_signature_and_believed_by_whoever_trusts_the_signer(
    bucket: MemoryDestination, signed: SignedDestination, signers: Signers
) -> None:
    Stock(signed).add(1, {"a": b"a"})
    assert why(signed) == ""
    only_reads = SignedDestination(bucket, Signing(signers.public, None, (signers.signer,)), {SERVER}.__contains__)
    assert why(only_reads) == ""
    assert problem_of(only_reads._signing, b"another document", get(bucket, key_of(1) + ".sig")) != ""
    assert examine(signed, None, clock=FakeClock()) == []


def get(destination: Destination, key: str) -> bytes:
    with destination.get(key) as stream:
        return stream.read()


def test_gpg_alone_can_say_that_a_manifest_is_what_was_signed(
    bucket: MemoryDestination, signed: SignedDestination, signers: Signers, tmp_path: Path
) -> None:
    Stock(signed).add(1, {"a": b"a"})
    for name, key in (("manifest.json", key_of(1)), ("manifest.json.sig", key_of(1) + ".sig")):
        (tmp_path / name).write_bytes(get(bucket, key))
    gpg(signers.public, "--verify", str(tmp_path / "manifest.json.sig"), str(tmp_path / "manifest.json"))


def test_what_is_unsigned_altered_or_signed_by_others_is_refused_in_words(
    bucket: MemoryDestination, signed: SignedDestination, signers: Signers
) -> None:
    header = Stock(signed).add(1, {"a": b"a"})
    good = get(bucket, key_of(1) + ".sig")

    def fresh() -> SignedDestination:
        return SignedDestination(bucket, signers.signing(), {SERVER}.__contains__)

    commit_header(bucket, replace(header, reason="swapped, and well formed"))
    assert "altered after it was signed" in why(fresh())
    commit_header(bucket, header)
    bucket.delete(key_of(1) + ".sig")
    assert "it has no signature" in why(fresh())
    with pytest.raises(DamagedError) as caught:
        load_header(fresh(), SERVER, backup_id(1))
    assert "backupd catalog sign offsite." in caught.value.hint
    branch = layout.branch_key(SERVER, backup_id(1))
    put(bucket, branch, b"{}")
    with pytest.raises(DamagedError) as caught:
        get(fresh(), branch)
    assert "backupd catalog sign offsite --unproven." in caught.value.hint, "no catalog has a digest of it"
    put(bucket, key_of(1) + ".sig", b"nonsense")
    assert "is no OpenPGP signature" in why(fresh())
    put(bucket, key_of(1) + ".sig", sign(replace(signers.signing(), key=signers.other), get(bucket, key_of(1))))
    assert f"signed by {signers.other}, a key that is not trusted here" in why(fresh())
    assert why(SignedDestination(bucket, signers.signing(signers.other), {SERVER}.__contains__)) == ""
    put(bucket, key_of(1) + ".sig", good)
    assert why(fresh()) == ""
    stranger = SignedDestination(bucket, Signing(signers.ignorant, None, (signers.signer,)), {SERVER}.__contains__)
    assert "with a key that is not in" in why(stranger)


GARBLED = (
    b"-----BEGIN PGP SIGNATURE-----\n\n/////////////////////////////////////////////////////w==\n"
    b"-----END PGP SIGNATURE-----\n"
)


@pytest.mark.parametrize("garbage", [GARBLED, GARBLED.replace(b"//", b"\x00\xff"), GARBLED.replace(b"/", b"A")])
def test_a_garbled_signature_is_one_manifest_that_is_not_believed_and_keeps_nobody_from_the_others(
    bucket: MemoryDestination, signed: SignedDestination, signers: Signers, garbage: bytes
) -> None:
    for number in (1, 2):
        Stock(signed).add(number, {"a": b"a"})
    put(bucket, key_of(1) + ".sig", garbage)
    reader = SignedDestination(bucket, signers.signing(), {SERVER}.__contains__)
    (finding,) = examine(reader, None, clock=FakeClock())
    assert finding.invariant is Invariant.MANIFEST_INTACT
    assert key_of(1) in finding.message
    assert "its signature cannot be read" in finding.message
    assert why(reader, 2) == ""


def test_without_gpg_nothing_is_called_damaged(
    bucket: MemoryDestination,
    signed: SignedDestination,
    signers: Signers,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    Stock(signed).add(1, {"a": b"a"})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissingError):
        read(SignedDestination(bucket, signers.signing(), {SERVER}.__contains__), SERVER, backup_id(1))


def test_a_signature_is_of_the_bytes_that_were_looked_at_whatever_lies_there_by_now(
    bucket: MemoryDestination, signed: SignedDestination
) -> None:
    header = Stock(bucket).add(1, {"a": b"a"})
    seen = signed.as_it_lies(key_of(1))
    commit_header(bucket, replace(header, reason="swapped meanwhile"))
    signed.sign(key_of(1), seen)
    assert "altered" in why(signed)


def test_proofs_and_copies_of_the_catalog_need_a_signature_too(bucket: MemoryDestination, signers: Signers) -> None:
    at, server_proof = START, layout.proof_key(SERVER, backup_id(1))
    keys = (server_proof, layout.catalog_key(at, "0123456789ab"), layout.configuration_key(at, "0123456789ab"))
    place = SignedDestination(bucket, signers.signing(), {SERVER, "*"}.__contains__)
    for key in keys:
        put(bucket, key, b"sealed by anybody")
        with pytest.raises(DamagedError, match="has no trusted signature") as caught:
            place.get(key)
        assert "it has no signature" in caught.value.detail
        assert "backupd catalog copy" in caught.value.hint
        put(place, key, b"ours")
        with place.get(key) as stream:
            assert stream.read() == b"ours"
        place.delete(key)
    assert list(bucket.list("")) == []
    others = layout.proof_key("another", backup_id(1))
    put(place, others, b"of a server whose policy does not say so")
    assert [info.key for info in bucket.list("")] == [others]


def test_a_revoked_signer_is_not_believed_and_one_that_has_expired_since_is() -> None:
    with short_directory("bt-sign-") as base:
        home = make_home(base / "home")
        try:
            key = make_key(home, "late@example.com", encryption=False)
            ours = Signing(home, key, (key,))
            made = sign(ours, b"document")
            gpg(home, "--quick-set-expire", key, "seconds=1")
            until_expired(home, key)
            assert problem_of(ours, b"document", made) == ""
            with pytest.raises(KeyUnusableError):
                sign(ours, b"another")
            certificate = (home / "openpgp-revocs.d" / f"{key}.rev").read_text().replace(":-----", "-----")
            gpg(home, "--import", stdin=certificate.encode())
            assert "revoked" in problem_of(ours, b"document", made)
        finally:
            stop_agent(home)


def until_expired(home: Path, key: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        fields = gpg(home, "--with-colons", "--list-keys", key).decode()
        if any(line.startswith("pub:e:") for line in fields.splitlines()):
            return
    raise AssertionError("it does not expire")


def test_without_the_secret_key_nothing_is_put_and_the_message_says_what_to_do(
    bucket: MemoryDestination, signers: Signers
) -> None:
    for signing, words in (
        (Signing(signers.public, signers.signer, ()), "cannot sign"),
        (Signing(signers.home, None, ()), "encryption.signing_key is not set"),
    ):
        blocked = SignedDestination(bucket, signing, {SERVER}.__contains__)
        with pytest.raises(KeyUnusableError, match=words):
            commit_header(blocked, Stock(bucket).header(1, ()))
    assert list(bucket.list("")) == []
    other = Stock(SignedDestination(bucket, Signing(signers.home, None, ()), {SERVER}.__contains__), server="other")
    other.add(1, {"a": b"a"})
    assert not [info.key for info in bucket.list("") if info.key.endswith(".sig")], "nobody asked for it there"


class Dying(ForwardingDestination):
    """Puts ``left`` more times."""

    def __init__(self, inner: Destination, left: int) -> None:
        super().__init__(inner)
        self.left = left

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        if not self.left:
            raise DestinationError("the machine is gone")
        self.left -= 1
        return super().put(key, stream)


@pytest.mark.parametrize("survives", range(4))
def test_a_document_that_replaces_another_one_is_believed_at_every_moment(
    bucket: MemoryDestination, signed: SignedDestination, signers: Signers, survives: int
) -> None:
    header = Stock(signed).add(1, {"a": b"a"})
    new = replace(header, reason="more is known now")
    dying = SignedDestination(Dying(bucket, survives), signers.signing(), {SERVER}.__contains__)
    if survives < 3:
        with pytest.raises(DestinationError, match="gone"):
            commit_header(dying, new)
    else:
        commit_header(dying, new)
    reader = SignedDestination(bucket, signers.signing(), {SERVER}.__contains__)
    assert load_header(reader, SERVER, backup_id(1)) == (header if survives < 2 else new)
    commit_header(reader, new)
    assert why(SignedDestination(bucket, signers.signing(), {SERVER}.__contains__)) == ""


def test_a_copy_keeps_the_signature_that_came_with_it(
    bucket: MemoryDestination, signed: SignedDestination, signers: Signers
) -> None:
    header = Stock(signed).add(1, {"a": b"a"})
    second = MemoryDestination("second")
    copying = SignedDestination(second, Signing(signers.public, None, (signers.signer,)), {SERVER}.__contains__)
    put(copying, key_of(1) + ".sig", get(bucket, key_of(1) + ".sig"))
    commit_header(copying, header)
    assert why(copying) == ""
    copying.delete(key_of(1))
    assert list(second.list("")) == []


def test_a_manifest_that_is_removed_in_this_moment_is_missing_not_damaged(
    bucket: MemoryDestination, signed: SignedDestination, signers: Signers
) -> None:
    Stock(signed).add(1, {"a": b"a"})

    class Vanishing(ForwardingDestination):
        def get(self, key: str, *, offset: int = 0, length: int | None = None) -> io.BytesIO:
            content = get(bucket, key)
            SignedDestination(bucket, signers.signing(), {SERVER}.__contains__).delete(key)
            return io.BytesIO(content)

    removed = SignedDestination(Vanishing(bucket), signers.signing(), {SERVER}.__contains__)
    assert read(removed, SERVER, backup_id(1)) is None


def test_a_forged_branch_or_segment_is_refused_and_its_true_form_is_put_again(
    bucket: MemoryDestination, signed: SignedDestination, signers: Signers
) -> None:
    log_segments.put_branch(signed, BRANCH)
    forged = replace(BRANCH, note="forged")
    log_segments.put_branch(bucket, forged)
    reader = SignedDestination(bucket, signers.signing(), {SERVER}.__contains__)
    (found,) = log_segments.branches(reader)
    assert isinstance(found, DamagedError)
    assert "altered" in found.detail
    log_segments.put_branch(reader, BRANCH)
    assert list(log_segments.branches(reader)) == [BRANCH]
    assert [
        finding
        for finding in examine(reader, None, clock=FakeClock())
        if finding.invariant is Invariant.NO_ORPHAN_SEGMENT_PART
    ] == []


def test_what_the_inner_destination_cannot_do_the_outer_one_says_it_cannot(signers: Signers) -> None:
    plain = SignedDestination(MemoryDestination("m", tree=False), signers.signing(), {SERVER}.__contains__)
    assert as_tree(plain) is None
    with pytest.raises(DestinationError, match="no archive classes"):
        plain.coldness("objects/x")
    with pytest.raises(DestinationError, match="no checksums"):
        plain.checksum("objects/x")
    with pytest.raises(ObjectMissingError):
        plain.unsigned(key_of(1))
