from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backupd.model.errors import KeyUnusableError, ToolError
from backupd.transfer.records.encryption import Sealer, Unsealer
from backupd.transfer.records.sealed_format import key_ids
from tests.support.keys import copy_public, gpg, make_key
from tests.support.stores.homes import Homes, NewHome

PART = 16 * 1024 * 1024


def sample(size: int) -> bytes:
    """Half noise, half text."""
    return os.urandom(size // 2) + (b"a row of a table, and another; " * (size // 60 + 1))[: size - size // 2]


@pytest.mark.parametrize("size", [0, 1, 1000, 128 * 1024, 128 * 1024 + 1, 1024 * 1024, 3_000_001, PART])
def test_what_was_sealed_opens_again(homes: Homes, size: int) -> None:
    plain = sample(size)
    sealed = Sealer([homes.one], homes.both).seal(plain)
    assert Unsealer(homes.both).unseal(sealed, limit=size) == plain


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_kind_of_buffer_is_taken_and_given_back(homes: Homes, kind: type) -> None:
    plain = kind(b"content")
    sealed = Sealer([homes.one], homes.both).seal(plain)
    assert Unsealer(homes.both).unseal(sealed, limit=100) == b"content"
    if isinstance(plain, bytearray):
        plain.clear()  # would raise if a view of it were still open


def test_it_opens_with_gpg_and_zstd_alone(homes: Homes, tmp_path: Path) -> None:
    plain = sample(1_000_000)
    file = tmp_path / "object"
    file.write_bytes(Sealer([homes.one], homes.both).seal(plain))
    opened = subprocess.run(
        ["sh", "-c", 'gpg -q --homedir "$0" -d "$1" | zstd -dc', str(homes.both), str(file)],
        check=True,
        capture_output=True,
    ).stdout
    assert opened == plain


def test_the_length_of_an_object_does_not_tell_which_known_file_it_is(homes: Homes) -> None:
    sealer = Sealer([homes.one], homes.both)
    lengths = {len(sealer.seal(os.urandom(size))) for size in range(1_000_000, 1_014_000, 1000)}
    assert len(lengths) == 1, "fourteen files of different lengths"


def test_the_plaintext_is_nowhere_in_the_object(homes: Homes) -> None:
    marker = b"MARKER-" + os.urandom(20).hex().encode()
    sealed = Sealer([homes.one], homes.both, level=1).seal(os.urandom(1000) + marker * 50)
    assert b"MARKER" not in sealed
    assert b"\x28\xb5\x2f\xfd" not in sealed[:200]


def test_each_recipient_can_open_it(homes: Homes, new_home: NewHome) -> None:
    public = new_home("p")
    copy_public(homes.both, public, "one@example.com")
    copy_public(homes.stranger, public, "stranger@example.com")
    sealer = Sealer([homes.one, homes.other], public)
    assert sealer.recipients == (homes.one, homes.other)
    sealed = sealer.seal(b"for both")
    assert len(key_ids(sealed)) == 2
    assert Unsealer(homes.both).unseal(sealed, limit=10) == b"for both"
    assert Unsealer(homes.stranger).unseal(sealed, limit=10) == b"for both"


def test_a_public_key_alone_is_enough_and_no_agent_is_started(homes: Homes, new_home: NewHome) -> None:
    public = new_home("p")
    copy_public(homes.both, public, "two@example.com")
    subprocess.run(["gpgconf", "--homedir", str(public), "--kill", "all"], check=True)
    for socket in public.glob("S.*"):
        socket.unlink()
    before = {path: path.stat().st_mtime_ns for path in public.rglob("*")}
    Sealer([homes.two], public).seal(b"x")
    assert {path: path.stat().st_mtime_ns for path in public.rglob("*")} == before


def test_a_pinned_subkey_is_used(homes: Homes) -> None:
    listed = gpg(homes.both, "--with-colons", "--with-subkey-fingerprint", "--list-keys", homes.one).decode()
    subkey = listed.split("fpr:::::::::")[2].split(":")[0]
    assert key_ids(Sealer([f"{subkey}!"], homes.both).seal(b"x")) == (subkey[-16:],)


def test_an_option_file_of_gpg_adds_no_recipient(homes: Homes, new_home: NewHome) -> None:
    home = new_home("p")
    copy_public(homes.both, home, "one@example.com")
    copy_public(homes.stranger, home, "stranger@example.com")
    (home / "gpg.conf").write_text(f"encrypt-to {homes.other}\nhidden-encrypt-to {homes.other}\narmor\n")
    assert len(key_ids(Sealer([homes.one], home).seal(b"x"))) == 1


@pytest.mark.parametrize("name", ["ops@example.com", "D8921E7EFF6A45CF", "", "x" * 40])
def test_only_full_fingerprints_are_taken(homes: Homes, name: str) -> None:
    with pytest.raises(KeyUnusableError, match="not a full fingerprint"):
        Sealer([name], homes.both)


def test_nobody_to_encrypt_for_is_refused(homes: Homes) -> None:
    with pytest.raises(KeyUnusableError, match="no recipients are configured"):
        Sealer([], homes.both)


def test_a_key_named_twice_by_two_fingerprints_is_refused(homes: Homes) -> None:
    listed = gpg(homes.both, "--with-colons", "--with-subkey-fingerprint", "--list-keys", homes.one).decode()
    subkey = listed.split("fpr:::::::::")[2].split(":")[0]
    with pytest.raises(KeyUnusableError, match="for 1 keys where 2"):
        Sealer([homes.one, subkey], homes.both).seal(b"x")


def test_a_missing_an_expired_and_a_revoked_key_are_named(homes: Homes, new_home: NewHome) -> None:
    home = new_home("p")
    copy_public(homes.both, home, "one@example.com")
    missing = "A" * 40
    with pytest.raises(KeyUnusableError, match=f"the key {missing} is not in this GnuPG home"):
        Sealer([homes.one, missing], home).seal(b"x" * 1_000_000)
    secret = new_home("s")
    expiring = make_key(secret, "old@example.com", expires="seconds=1")
    time.sleep(2.1)  # the key's own clock
    with pytest.raises(KeyUnusableError, match=f"the key {expiring} has expired"):
        Sealer([expiring], secret).seal(b"x")
    revoked = make_key(secret, "gone@example.com")
    certificate = (secret / "openpgp-revocs.d" / f"{revoked}.rev").read_bytes().replace(b":-----BEGIN", b"-----BEGIN")
    gpg(secret, "--import", stdin=certificate)
    with pytest.raises(KeyUnusableError, match=f"the key {revoked} cannot be used: it is revoked"):
        Sealer([revoked], secret).seal(b"x")


def test_a_missing_home_is_said(tmp_path: Path) -> None:
    with pytest.raises(KeyUnusableError, match=r"GnuPG home .* does not exist"):
        Sealer(["A" * 40], tmp_path / "nowhere").seal(b"x")


_BROKEN = {
    "killed at the start": "kill -9 $$",
    "killed after its output": f'"{shutil.which("gpg")}" "$@"; kill -9 $$',
    "ends badly after its output": f'"{shutil.which("gpg")}" "$@"; echo disk on fire >&2; exit 2',
    "ends well without output": "cat >/dev/null; exit 0",
    "ends well with half of the output": f'"{shutil.which("gpg")}" "$@" | head -c 5000; exit 0',
    "ends well without reading": "exit 0",
    "passes everything through": "cat",
}


@pytest.mark.parametrize("how", _BROKEN)
def test_a_gpg_that_fails_never_yields_an_object(
    homes: Homes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    fake = tmp_path / "gpg"
    fake.write_text(f"#!/bin/sh\n{_BROKEN[how]}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ToolError) as caught:
        Sealer([homes.one], homes.both).seal(sample(3_000_000))
    if how == "ends badly after its output":
        assert "disk on fire" in str(caught.value)


def test_eight_threads_seal_and_eight_unseal_at_once(homes: Homes) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    plains = [random.Random(seed + n).randbytes(200_000) for n in range(48)]
    sealer = Sealer([homes.one, homes.two], homes.both)
    unsealer = Unsealer(homes.both)
    subprocess.run(["gpgconf", "--homedir", str(homes.both), "--kill", "all"], check=True)  # eight start it again
    with ThreadPoolExecutor(8) as pool:
        sealed = list(pool.map(sealer.seal, plains))
        assert list(pool.map(lambda one: unsealer.unseal(one, limit=200_000), sealed)) == plains


def test_more_threads_than_the_agent_can_bear_still_all_succeed(homes: Homes) -> None:
    sealed = Sealer([homes.two], homes.both).seal(b"small")
    unsealer = Unsealer(homes.both)
    with ThreadPoolExecutor(32) as pool:
        assert set(pool.map(lambda _: unsealer.unseal(sealed, limit=5), range(200))) == {b"small"}


_PEAK = """
import os, resource, sys
from pathlib import Path
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.encryption import Unsealer
home, fingerprint, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
sealer, unsealer = Sealer([fingerprint], home), Unsealer(home)
unsealer.unseal(sealer.seal(b"warm up"), limit=10)
plain = os.urandom(size)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sealed = sealer.seal(plain)
between = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
plain_again = unsealer.unseal(sealed, limit=size)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert plain_again == plain
print((between - before) // 1024, (after - between) // 1024)
"""


def test_sealing_holds_plain_and_sealed_in_memory_but_nothing_in_between(homes: Homes) -> None:
    size = 64 * 1024 * 1024  # incompressible, so all forms are of that size
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(homes.both), homes.one, str(size)], check=True, capture_output=True, text=True
    )
    sealing, opening = (int(word) for word in done.stdout.split())
    assert sealing < 64 * 1.25 + 16
    assert opening < 64 * 1.25 + 16


def test_nothing_of_it_is_left_running(homes: Homes) -> None:
    Sealer([homes.one], homes.both).seal(b"x")  # the thread that starts programs stays from now on
    threads = threading.enumerate()
    Sealer([homes.one], homes.both).seal(b"x")
    assert [thread.name for thread in threading.enumerate() if thread not in threads] == []
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
