from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import zstandard

from backupd.model.errors import BackupdError, DamagedError, KeyUnusableError, ToolError
from backupd.transfer.records.encryption import Sealer, Unsealer
from backupd.transfer.records.gpg import usable_home
from backupd.transfer.records.sealed_format import key_ids
from tests.support.dice import thrown
from tests.support.keys import make_home, stop_agent
from tests.support.stores.homes import Homes, NewHome, with_passphrase


def encrypted(homes: Homes, content: bytes, *options: str, recipient: str = "") -> bytes:
    """What gpg makes of ``content`` as it is, without our zstd."""
    return subprocess.run(
        [
            "gpg",
            "--homedir",
            str(homes.both),
            "--batch",
            "-q",
            "--trust-model",
            "always",
            *options,
            "-e",
            "-r",
            recipient or homes.one,
        ],
        input=content,
        check=True,
        capture_output=True,
    ).stdout


def refused(homes: Homes, stored: bytes, *, limit: int = 10_000_000) -> BackupdError:
    with pytest.raises(BackupdError) as caught:
        Unsealer(homes.both).unseal(stored, limit=limit)
    assert isinstance(caught.value, DamagedError | KeyUnusableError), str(caught.value)
    return caught.value


_RSA, _RSA_ENCRYPT_ONLY = 1, 2
"""Two numbers of one algorithm (RFC 4880, 9.1): the one instead of the other changes nothing."""
_OLD_HEAD, _NEW_HEAD = 0x84, 0xC1
"""Of a session key packet whose length is one byte, in the old format and the new one: the same is said."""


@pytest.mark.parametrize("which", ["one", "two"])
def test_every_flipped_byte_is_refused(homes: Homes, which: str) -> None:
    sealed = Sealer([getattr(homes, which)], homes.both).seal(os.urandom(100_000))
    chance = thrown("flipped bytes")
    head, tail = range(110), range(len(sealed) - 30, len(sealed))
    offsets = [*head, *chance.sample(range(110, len(sealed) - 30), 40), *tail]
    if which == "two":
        offsets = offsets[::4]  # RSA takes its time
    for offset in offsets:
        damaged = bytearray(sealed)
        damaged[offset] ^= chance.randrange(1, 256)
        if (sealed[offset], damaged[offset], offset) in ((_RSA, _RSA_ENCRYPT_ONLY, 12), (_OLD_HEAD, _NEW_HEAD, 0)):
            continue
        refused(homes, bytes(damaged))


def test_another_algorithm_of_the_session_key_is_damage(homes: Homes) -> None:
    sealed = Sealer([homes.one], homes.both).seal(b"x")
    for algorithm in (0, 3, 16, 17, 20, 22, 25, 255):  # 20 makes gpg see no packet at all
        damaged = bytearray(sealed)
        damaged[11] = algorithm
        assert isinstance(refused(homes, bytes(damaged)), DamagedError), algorithm


def test_another_kind_of_data_packet_is_damage(homes: Homes) -> None:
    sealed = Sealer([homes.one], homes.both).seal(os.urandom(1000))
    damaged = bytearray(sealed)
    data = 2 + sealed[1]  # behind the session key packet
    assert sealed[data] == 0xC0 | 18
    for tag in (9, 20):  # without protection; with another kind of it, whose head is nonsense then
        damaged[data] = 0xC0 | tag
        assert isinstance(refused(homes, bytes(damaged)), DamagedError), tag


def test_every_flipped_bit_of_the_session_key_packet_is_refused_or_harmless_before_gpg_sees_it(homes: Homes) -> None:
    sealed = Sealer([homes.one], homes.both).seal(b"x")
    # The bits that gpg itself lets pass: version, length of an integer, prefix and last bit of the point.
    for offset, bit in ((2, 1), (13, 1), (13, 2), (13, 4), (14, 64), (46, 128)):
        damaged = bytearray(sealed)
        damaged[offset] ^= bit
        with pytest.raises(DamagedError):
            key_ids(bytes(damaged))


def test_every_truncation_is_refused(homes: Homes) -> None:
    sealed = Sealer([homes.one], homes.both).seal(os.urandom(50_000))
    lengths = [*range(0, 130, 3), *range(130, len(sealed), 1501), *range(len(sealed) - 40, len(sealed), 3)]
    for length in lengths:
        refused(homes, sealed[:length])


def test_appended_bytes_are_refused(homes: Homes) -> None:
    sealed = Sealer([homes.one], homes.both).seal(b"content")
    marker, private, user_id = b"\xca\x03PGP", b"\xfd\x03abc", b"\xcd\x03abc"
    for extra in (b"\0", b"\n", b"\xff", b"hello", sealed, marker, private, user_id, os.urandom(40)):
        refused(homes, sealed + extra)
        refused(homes, extra + sealed)


def test_more_plaintext_than_the_limit_is_refused(homes: Homes) -> None:
    sealed = Sealer([homes.one], homes.both).seal(bytes(1001))
    assert Unsealer(homes.both).unseal(sealed, limit=1001) == bytes(1001)
    assert "1001 bytes where 1000" in str(refused(homes, sealed, limit=1000))


def test_a_bomb_is_refused_before_it_bursts(homes: Homes) -> None:
    frame = zstandard.ZstdCompressor(level=19).compressobj(size=2000 << 20)
    bomb = b"".join([frame.compress(bytes(1 << 20)) for _ in range(2000)]) + frame.flush()
    assert len(bomb) < 300_000
    assert "are expected" in str(refused(homes, encrypted(homes, bomb)))


def test_something_else_than_one_whole_zstd_frame_is_refused(homes: Homes) -> None:
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(b"content" * 1000)
    assert Unsealer(homes.both).unseal(encrypted(homes, frame), limit=7000) == b"content" * 1000
    for content in (
        b"",
        b"plain text that is long enough",
        frame[:-1],
        frame[:-4],
        frame[:-5],
        frame[:10],
        frame[:3],
        frame + b"\0",
        frame + frame,
        frame[:-1] + b"\0",
    ):
        refused(homes, encrypted(homes, content))


def test_what_is_not_openpgp_or_not_encrypted_is_refused(homes: Homes) -> None:
    signed = subprocess.run(
        ["gpg", "--homedir", str(homes.both), "--batch", "-q", "-u", homes.one, "-s"],
        input=b"x",
        check=True,
        capture_output=True,
    ).stdout
    literal = subprocess.run(
        ["gpg", "--homedir", str(homes.both), "--batch", "-q", "--store"], input=b"x", check=True, capture_output=True
    ).stdout
    symmetric = subprocess.run(
        [
            "gpg",
            "--homedir",
            str(homes.both),
            "--batch",
            "-q",
            "--passphrase",
            "x",
            "--pinentry-mode",
            "loopback",
            "-c",
        ],
        input=b"x",
        check=True,
        capture_output=True,
    ).stdout
    armored = encrypted(homes, b"x", "--armor")
    for stored in (b"", b"\0", b"nothing of the kind", signed, literal, symmetric, armored, os.urandom(1000)):
        refused(homes, stored)


def test_data_without_integrity_protection_is_refused_even_if_an_option_file_allows_it(
    homes: Homes,
    tmp_path: Path,
) -> None:
    stored = encrypted(homes, b"x", "--rfc2440", "--disable-mdc", "--cipher-algo", "3DES")
    assert "integrity" in str(refused(homes, stored))


def test_a_wrong_key_is_an_error_that_names_the_keys(homes: Homes) -> None:
    sealed = Sealer([homes.one, homes.two], homes.both).seal(b"content")
    with pytest.raises(KeyUnusableError) as caught:
        Unsealer(homes.stranger).unseal(sealed, limit=100)
    for key_id in key_ids(sealed):
        assert key_id in caught.value.message
    assert str(homes.stranger) in caught.value.message
    assert "--import" in caught.value.hint


def test_a_home_that_is_missing_or_empty_is_an_error(homes: Homes, tmp_path: Path, new_home: NewHome) -> None:
    sealed = Sealer([homes.one], homes.both).seal(b"content")
    with pytest.raises(KeyUnusableError, match="does not exist"):
        Unsealer(tmp_path / "nowhere").unseal(sealed, limit=100)
    empty = new_home("empty")
    with pytest.raises(KeyUnusableError, match="encrypted for"):
        Unsealer(empty).unseal(sealed, limit=100)


def test_passphrases_come_from_a_file_and_wrong_or_missing_ones_are_named(short_tmp: Path) -> None:
    home = make_home(short_tmp / "h")
    fingerprint = with_passphrase(home, "p@example.com", "a secret # phrase")
    sealed = Sealer([fingerprint], home).seal(b"content")
    right, wrong = short_tmp / "right", short_tmp / "wrong"
    right.write_text("a secret # phrase\n")
    wrong.write_text("another one\n")
    with pytest.raises(KeyUnusableError, match="the passphrase is missing"):
        Unsealer(home).unseal(sealed, limit=100)
    with pytest.raises(KeyUnusableError, match="the passphrase is wrong"):
        Unsealer(home, wrong).unseal(sealed, limit=100)
    with pytest.raises(KeyUnusableError, match=r"passphrase file .* does not exist"):
        Unsealer(home, short_tmp / "none").unseal(sealed, limit=100)
    assert Unsealer(home, right).unseal(sealed, limit=100) == b"content"
    stop_agent(home)


def test_a_home_with_a_long_path_works(homes: Homes, tmp_path: Path) -> None:
    long_home = tmp_path / ("long" * 30) / "home"
    shutil.copytree(homes.both, long_home, ignore=shutil.ignore_patterns("S.*", "*.lock"))
    assert len(str(usable_home(long_home))) < 80
    sealed = Sealer([homes.one], long_home).seal(b"content")
    assert Unsealer(long_home).unseal(sealed, limit=100) == b"content"
    stop_agent(long_home)
    assert not (long_home / "S.gpg-agent").exists()


_BROKEN = {
    "killed after its output": f'"{shutil.which("gpg")}" "$@"; kill -9 $$',
    "ends badly after its output": f'"{shutil.which("gpg")}" "$@"; echo disk on fire >&2; exit 2',
    "ends well without a word": "cat >/dev/null",
    "decrypts without saying that all is well": f'"{shutil.which("gpg")}" --batch -q --homedir HOME --decrypt',
}


@pytest.mark.parametrize("how", _BROKEN)
def test_nothing_is_returned_that_gpg_has_not_confirmed(
    homes: Homes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    sealed = Sealer([homes.one], homes.both).seal(os.urandom(1_000_000))
    fake = tmp_path / "gpg"
    fake.write_text(f"#!/bin/sh\n{_BROKEN[how].replace('HOME', str(homes.both))}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises((ToolError, DamagedError)) as caught:
        Unsealer(homes.both).unseal(sealed, limit=1_000_000)
    assert isinstance(caught.value, ToolError) == how.startswith(("killed", "ends badly")), caught.value
