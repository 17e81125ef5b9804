from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.model.errors import DestinationError, DestinationFullError, ObjectMissingError, RefusedError
from storage import layout
from storage.destination import Capability, Destination
from storage.filesystem import FilesystemDestination
from storage.sftp.destination import SftpDestination
from storage.sftp.session import Sessions, known_host
from storage.sftp.wire import FSYNC, POSIX_RENAME, STATVFS, Wire
from tests.contract.destination import KEY, OTHER, PART, SLOW_SOURCE, DestinationContract, get, keys, put
from tests.support.dice import rounds, thrown
from tests.support.stores.ssh_server import SshServer, make_key, ssh_server, why_not

__all__ = ["ssh_server"]
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")

HOSTILE = "re po'si\"tory $HOME ß;`x`"
"""A folder's name."""


def now() -> datetime:
    return datetime.now(UTC)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def connections(ssh_server: SshServer) -> Iterator[Sessions]:
    """Of all destinations on ``ssh_server``: a hundred logins would be most of the time here."""
    sessions = Sessions("vault", ssh_server.config("/x"))
    yield sessions
    sessions.close()


@pytest.fixture
def bare(ssh_server: SshServer, connections: Sessions, tmp_path: Path) -> SftpDestination:
    destination = SftpDestination("vault", ssh_server.config(tmp_path / HOSTILE))
    destination._sessions = connections
    return destination


@pytest.fixture
def destination(bare: SftpDestination) -> SftpDestination:
    bare.initialise(now())
    return bare


@pytest.fixture
def own() -> Iterator[SshServer]:
    """A server that may be stopped, cut and given other keys."""
    with SshServer() as server:
        yield server


@pytest.fixture
def vault(own: SshServer) -> Iterator[SftpDestination]:
    """On ``own``."""
    destination = SftpDestination("vault", own.config(own.base / "vault"))
    destination.initialise(now())
    yield destination
    destination.close()


class TestSftp(DestinationContract):
    pass


# What it leaves there


def test_what_lies_there_can_be_read_as_a_folder(destination: SftpDestination, tmp_path: Path) -> None:
    put(destination, KEY, b"x" * 3 * PART)
    local = FilesystemDestination("local", tmp_path / HOSTILE)
    assert local.is_initialised()
    assert Capability.TREE not in local.capabilities
    assert get(local, KEY) == b"x" * 3 * PART
    assert files(local.root) == [KEY, layout.REPOSITORY]
    assert (local.root / KEY).stat().st_mode & 0o777 == 0o640


def test_a_folder_that_holds_something_else_is_not_taken(bare: SftpDestination, tmp_path: Path) -> None:
    (tmp_path / HOSTILE).mkdir()
    (tmp_path / HOSTILE / "letters").write_text("precious")
    with pytest.raises(RefusedError, match="is not empty") as caught:
        bare.initialise(now())
    assert "letters" in caught.value.detail
    assert not bare.is_initialised()


def test_a_folder_without_a_parent_is_not_made(ssh_server: SshServer, tmp_path: Path) -> None:
    destination = SftpDestination("vault", ssh_server.config(tmp_path / "not/there"))
    assert not destination.is_initialised()
    with pytest.raises(DestinationError, match="no parent") as caught:
        destination.initialise(now())
    assert f"create {tmp_path}/not there first" in caught.value.hint
    destination.close()


def test_many_folders_are_listed_as_a_local_folder_lists_them(destination: SftpDestination, tmp_path: Path) -> None:
    for index in range(30):
        put(destination, layout.object_key(f"{index * 7:02x}" * 32 + "-" + "01" * 8), b"x")
    local = FilesystemDestination("local", tmp_path / HOSTILE)
    for prefix in ("", "objects/", "objects/0", "objects/07/"):
        assert list(keys(destination, prefix)) == keys(local, prefix)
    assert len(keys(destination, "objects/")) == 30


def test_bytes_and_names_are_durable_before_a_put_returns(
    destination: SftpDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for name in ("finish", "move", "sync_folder"):
        real = getattr(Wire, name)

        def noted(
            self: Wire, path: object, *more: object, _name: str = name, _real: object = real, **options: object
        ) -> object:
            steps.append(f"{_name} {path}" if _name == "sync_folder" else _name)
            assert callable(_real)
            return _real(self, path, *more, **options)

        monkeypatch.setattr(Wire, name, noted)
    put(destination, KEY, b"x")
    folder = KEY.rpartition("/")[0]
    # A synced folder is opened and finished as a file is.
    assert next(step for step in steps if step != "finish") == "move"
    assert steps[0] == "finish"
    assert steps[-2].endswith(f"/{folder}")


def test_a_stream_needs_a_few_megabytes_however_long_it_is(destination: SftpDestination) -> None:
    class Long(io.RawIOBase):
        left = 48

        def read(self, size: int = -1, /) -> bytes:
            self.left -= 1
            return bytes(PART) if self.left >= 0 else b""

    def drain() -> None:
        with destination.get(KEY) as stream:
            while stream.read(PART):
                pass

    put(destination, KEY, b"x")
    tracemalloc.start()
    try:
        destination.put(KEY, Long())  # type: ignore[arg-type]  # read is all that is asked of it
        drain()
        assert tracemalloc.get_traced_memory()[1] < 16 * PART
    finally:
        tracemalloc.stop()
    assert destination.stat(KEY).size == 48 * PART


# Unfinished

WRITER = f"""
{SLOW_SOURCE}
from storage.config import SftpConfig
from storage.sftp.destination import SftpDestination
from storage.sftp.session import Sessions

SftpDestination("vault", SftpConfig.model_validate_json(sys.argv[1])).put(sys.argv[2], Slow())
"""


def test_a_kill_midway_leaves_no_object_and_what_is_left_is_cleared_a_day_later(
    own: SshServer, vault: SftpDestination
) -> None:
    config = own.config(own.base / "vault").model_dump_json()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, config, KEY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(layout.__file__).parents[1],
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "midway\n"
        writer.kill()
    own.cut()
    assert keys(vault) == []
    assert list(vault.leftovers()) == [], "its writer might be alive, elsewhere"
    assert vault.clear_leftovers() == 0
    (left,) = (own.base / "vault/.tmp").iterdir()
    yesterday = time.time() - 86500
    os.utime(left, (yesterday, yesterday))
    assert list(vault.leftovers()) == [f".tmp/{left.name}"]
    assert vault.clear_leftovers() == 1
    assert files(own.base / "vault") == [layout.REPOSITORY]


# Lost connections


def test_connections_that_were_cut_are_replaced_unnoticed(own: SshServer, vault: SftpDestination) -> None:
    for ask in (
        lambda: put(vault, KEY, b"x"),
        lambda: vault.stat(KEY),
        lambda: get(vault, KEY),
        lambda: keys(vault),
        vault.space,
        vault.is_initialised,
        lambda: list(vault.leftovers()),
        lambda: vault.delete(KEY),
    ):
        ask()
        own.cut()
    assert keys(vault) == []


@pytest.mark.parametrize("after", [1, 5])
def test_a_put_goes_on_after_its_connection_was_cut(own: SshServer, vault: SftpDestination, after: int) -> None:
    content = os.urandom(6 * PART + 77)

    class Cutting(io.BytesIO):
        count = 0

        def read(self, size: int | None = -1, /) -> bytes:
            self.count += 1
            if self.count == after:
                own.cut()
            return super().read(size)

    assert vault.put(KEY, Cutting(content)).size == len(content)
    assert get(vault, KEY) == content
    assert files(own.base / "vault") == [KEY, layout.REPOSITORY]


def test_reading_goes_on_after_its_connection_was_cut(own: SshServer, vault: SftpDestination) -> None:
    content = os.urandom(6 * PART + 77)
    put(vault, KEY, content)
    with vault.get(KEY, offset=5, length=5 * PART) as stream:
        first = stream.read(PART + 1)
        own.cut()
        second = stream.read(PART)
        own.cut()
        assert first + second + stream.read() == content[5 : 5 + 5 * PART]


def test_after_a_cut_nobody_reads_on_in_another_object(own: SshServer, vault: SftpDestination) -> None:
    put(vault, KEY, b"a" * 6 * PART)
    with vault.get(KEY) as stream:
        stream.read(10)
        put(vault, KEY, b"b" * 7 * PART)
        own.cut()
        with pytest.raises(DestinationError, match="reading") as caught:
            stream.read()
    assert "the file was replaced meanwhile" in caught.value.detail


def test_an_object_that_became_shorter_is_no_short_success(own: SshServer, vault: SftpDestination) -> None:
    put(vault, KEY, b"a" * 6 * PART)
    with vault.get(KEY) as stream:
        stream.read(10)
        os.truncate(own.base / "vault" / KEY, 4 * PART)
        with pytest.raises(DestinationError) as caught:
            stream.read()
    assert f"it ends after {4 * PART} bytes, and it had {6 * PART}" in caught.value.detail


@pytest.mark.campaign
def test_whatever_is_cut_and_when_nothing_false_is_said(own: SshServer, vault: SftpDestination) -> None:
    dice = thrown("sftp-cuts")
    over = threading.Event()

    def disturb() -> None:
        while not over.wait(dice.uniform(0.01, 0.25)):
            own.cut()

    disturber = threading.Thread(target=disturb)
    disturber.start()
    told: dict[str, bytes] = {}
    refused = 0
    try:
        for index in range(rounds(12)):
            key = f"pins/p{index}.json" if dice.random() < 0.5 else layout.object_key(f"{index:064x}-" + "01" * 8)
            content = dice.randbytes(dice.choice([0, 9, PART, 2 * PART + 3]))
            try:
                put(vault, key, content)
            except DestinationError:
                refused += 1
            else:
                told[key] = content
            try:
                assert get(vault, key) == content
            except ObjectMissingError:
                assert key not in told
            except DestinationError:
                refused += 1
    finally:
        over.set()
        disturber.join()
    print(f"{len(told)} stored, {refused} refused")
    assert {key: get(vault, key) for key in told} == told


# Hosts that hang or are gone


def test_a_host_that_hangs_is_an_error_and_no_wait_for_ever(
    own: SshServer, vault: SftpDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(vault, KEY, b"x" * 4 * PART)
    used, new = (SftpDestination("vault", own.config(own.base / "vault"), seconds=3) for _ in range(2))
    assert used.is_initialised()
    with used.get(KEY) as stream:
        stream.read(1)
        with own.stopped(), monkeypatch.context() as patch:
            patch.setattr("storage.sftp.session.CONNECT_SECONDS", 1.0)
            for ask in (stream.read, lambda: used.stat(KEY), lambda: put(used, OTHER, b"x"), new.is_initialised):
                began = time.monotonic()
                with pytest.raises(DestinationError) as caught:
                    ask()
                assert time.monotonic() - began < 120
                assert "vault" in caught.value.message
                assert not isinstance(caught.value, ObjectMissingError)
    assert get(vault, KEY) == b"x" * 4 * PART
    assert new.is_initialised()
    new.close()
    used.close()


def test_a_host_that_is_gone_is_named_and_comes_back(own: SshServer, vault: SftpDestination) -> None:
    put(vault, KEY, b"x")
    own.stop()
    for ask in (
        lambda: get(vault, KEY),
        vault.is_initialised,
        lambda: put(vault, KEY, b"y"),
        vault.space,
        lambda: keys(vault),
        lambda: vault.delete(KEY),
    ):
        with pytest.raises(DestinationError, match=rf"destination vault .*127\.0\.0\.1:{own.port}.* cannot be reached"):
            ask()
    own.start()
    assert get(vault, KEY) == b"x"


# Who is let in, and who is trusted


def fingerprint(public: Path) -> str:
    return subprocess.run(
        ["ssh-keygen", "-l", "-f", str(public)], check=True, capture_output=True, text=True
    ).stdout.split()[1]


def refusal(destination: Destination) -> DestinationError:
    with pytest.raises(DestinationError) as caught:
        destination.is_initialised()
    return caught.value


def test_a_host_that_is_not_known_is_not_talked_to_and_its_fingerprint_is_told(own: SshServer) -> None:
    shown = fingerprint(own.host_key.with_suffix(".pub"))
    destination = SftpDestination("vault", own.config(own.base / "vault"))
    own.known_hosts.write_text("")
    error = refusal(destination)
    assert f"shows ssh-ed25519 {shown}" in error.detail
    assert f"has none for [127.0.0.1]:{own.port}" in error.detail
    assert f"ssh-keyscan -p {own.port} 127.0.0.1" in error.hint
    subprocess.run(
        f"ssh-keyscan -T 120 -p {own.port} 127.0.0.1 >> '{own.known_hosts}' 2> /dev/null", shell=True, check=True
    )
    assert not destination.is_initialised()
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(own.known_hosts)], check=True, capture_output=True)
    assert b"127.0.0.1" not in own.known_hosts.read_bytes()
    destination.close()
    assert not destination.is_initialised(), "hashed names are names, too"
    destination.close()


def test_a_host_that_shows_another_key_than_before_is_not_talked_to(own: SshServer) -> None:
    other = own.base / "other"
    make_key(other)
    own.write_known_hosts(other)
    destination = SftpDestination("vault", own.config(own.base / "vault"))
    error = refusal(destination)
    assert "its host key has changed" in error.detail
    for public in (own.host_key.with_suffix(".pub"), other.with_suffix(".pub")):
        assert fingerprint(public) in error.detail
    assert "connection may be intercepted" in error.hint
    line = own.host_key.with_suffix(".pub").read_text()
    own.write_known_hosts(own.host_key)
    own.known_hosts.write_text(own.known_hosts.read_text() + f"@revoked * {line}")
    assert "was revoked" in refusal(destination).detail


def test_names_of_hosts_are_read_as_ssh_reads_them(tmp_path: Path) -> None:
    key = "AAAAC3NzaC1lZDI1NTE5AAAAIEGKgrYIM9KuDfZ5q/bYTNRPc5JYxbl0sjOKMoNeJ9Mk"
    file = tmp_path / "known_hosts"

    def knows(names: str, host: str, port: int = 22) -> bool:
        file.write_text(
            f"# x\n\n@cert-authority * ssh-ed25519 {key}\njunk\n{names} ssh-ed25519 {key} comment\n"
            f"{host} ssh-ed25519 not/base64!\n"
        )
        found = known_host(file, host, port)
        assert not found.revoked
        return len(found.keys) == 1

    assert knows("vault.example.com,192.0.2.7", "192.0.2.7")
    assert knows("VAULT.example.com", "vault.EXAMPLE.com")
    assert knows("*.example.com", "a.example.com")
    assert knows("[vault]:2222", "vault", 2222)
    assert knows("[*.example.com]:2222", "a.example.com", 2222)
    assert not knows("vault", "vault", 2222)
    assert not knows("[vault]:2222", "vault")
    assert not knows("!a.example.com,*.example.com", "a.example.com")
    assert not knows("|1|x|y", "vault")


def test_the_kind_of_host_key_that_is_known_is_the_one_that_is_asked_for() -> None:
    with SshServer() as own:
        second = own.base / "rsa"
        make_key(second, kind="rsa")
        own.write_known_hosts(second)
        own.stop()
        own.options["HostKey"] = f"{own.host_key}\nHostKey {second}"
        own.start()
        destination = SftpDestination("vault", own.config(own.base / "vault"))
        assert not destination.is_initialised()
        destination.close()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("stranger", "may not log in with this key"),
        ("passphrase", "has a passphrase"),
        ("gone", "cannot be read"),
        ("junk", "holds no usable private key"),
        ("public", "holds no usable private key"),
        ("known_hosts", "known hosts"),
    ],
)
def test_a_key_that_does_not_open_is_said_in_words(
    ssh_server: SshServer, tmp_path: Path, what: str, words: str
) -> None:
    key = tmp_path / "key"
    more: dict[str, object] = {"key_file": key}
    if what in ("stranger", "public"):
        make_key(key)
    elif what == "passphrase":
        make_key(key, passphrase="secret words")
    elif what == "junk":
        key.write_text("junk")
    elif what == "known_hosts":
        more = {"known_hosts": tmp_path / "none"}
    if what == "public":
        key = key.with_suffix(".pub")
        more = {"key_file": key}
    error = refusal(SftpDestination("vault", ssh_server.config(tmp_path / "vault", **more)))
    assert words in error.detail
    assert "secret words" not in str(error)
    assert error.hint


def test_a_server_without_sftp_is_said_as_such() -> None:
    with SshServer({"Subsystem": "nothing /bin/true"}) as own:
        assert (
            "the SFTP subsystem did not start"
            in refusal(SftpDestination("vault", own.config(own.base / "vault"))).detail
        )


def test_a_server_that_cannot_replace_in_one_step_is_refused_and_other_extensions_are_not_needed() -> None:
    with SshServer({"Subsystem": "sftp internal-sftp -P posix-rename"}) as own:
        assert POSIX_RENAME in refusal(SftpDestination("vault", own.config(own.base / "vault"))).detail
    with SshServer({"Subsystem": "sftp internal-sftp -P fsync,statvfs"}) as own:
        destination = SftpDestination("vault", own.config(own.base / "vault"))
        destination.initialise(now())
        put(destination, KEY, b"x")
        assert get(destination, KEY) == b"x"
        assert destination.space() is None
        assert destination.capabilities is Capability.COPIES, (STATVFS, FSYNC)
        destination.close()


def test_a_server_that_makes_no_links_has_what_is_copied_sent() -> None:
    with SshServer({"Subsystem": "sftp internal-sftp -P hardlink,statvfs"}) as own:
        destination = SftpDestination("vault", own.config(own.base / "vault"))
        destination.initialise(now())
        put(destination, KEY, b"x")
        assert not destination.duplicate(KEY, OTHER)
        assert destination.space() is None
        assert destination.capabilities is Capability.NONE
        assert [info.key for info in destination.list("objects/")] == [KEY]
        assert not list(destination.leftovers())
        destination.close()


# Full, forbidden, unmounted


@pytest.fixture
def mounted(ssh_server: SshServer, tmp_path: Path) -> Iterator[tuple[Path, SftpDestination]]:
    """A file system of 4 MiB and 60 inodes of its own, and the destination in it."""
    point = tmp_path / "disk"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=60", "tmpfs", str(point)], check=True)
    destination = SftpDestination("vault", ssh_server.config(point))
    destination.initialise(now())
    yield point, destination
    destination.close()
    subprocess.run(["umount", "-l", str(point)], check=False, capture_output=True)


@as_root
def test_a_full_disk_is_told_with_its_free_bytes_and_leaves_nothing(mounted: tuple[Path, SftpDestination]) -> None:
    point, vault = mounted
    put(vault, OTHER, b"y" * PART)
    with pytest.raises(DestinationFullError) as caught:
        put(vault, KEY, b"x" * (8 * PART))
    assert re.search(r"\d+ bytes free", caught.value.detail)
    assert caught.value.destination == "vault"
    assert files(point) == sorted([OTHER, layout.REPOSITORY])
    put(vault, KEY, b"x" * PART)
    assert keys(vault) == [KEY, OTHER]

    def fill() -> None:
        for index in range(100):
            put(vault, f"pins/p{index}.json", b"x")

    with pytest.raises(DestinationFullError, match="inodes"):
        fill()


@as_root
def test_an_unmounted_disk_is_noticed_by_every_call(mounted: tuple[Path, SftpDestination]) -> None:
    point, vault = mounted
    put(vault, KEY, b"x")
    subprocess.run(["umount", str(point)], check=True)
    assert not vault.is_initialised()
    for ask in (
        lambda: put(vault, OTHER, b"x"),
        lambda: get(vault, KEY),
        lambda: vault.stat(KEY),
        lambda: keys(vault),
        lambda: vault.delete(KEY),
        vault.clear_leftovers,
    ):
        with pytest.raises(DestinationError, match="failed") as caught:
            ask()
        assert not isinstance(caught.value, ObjectMissingError)
        assert "mounted" in caught.value.hint
    assert files(point) == []


def test_a_name_that_is_a_folder_is_no_reason_to_hang(destination: SftpDestination, tmp_path: Path) -> None:
    (tmp_path / HOSTILE / "pins/a").mkdir(parents=True)
    with pytest.raises(DestinationError):
        put(destination, "pins/a", b"x")
    with pytest.raises(DestinationError):
        get(destination, "pins/a")
    assert keys(destination, "pins/") == []
    assert list(destination.leftovers()) == []
    shutil.rmtree(tmp_path / HOSTILE / "pins")


@pytest.mark.parametrize("link", ["pins", "pins/shop", "pins/shop/a.json"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_symbolic_link_below_the_root_is_refused_by_name_and_never_listed_as_nothing(
    destination: SftpDestination, tmp_path: Path, link: str, *, dangling: bool
) -> None:
    put(destination, "pins/shop/a.json", b"x")
    path = tmp_path / HOSTILE / link
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / ("nowhere" if dangling else "elsewhere"))
    for prefix in ("", "pins/", "pins/shop/"):
        with pytest.raises(DestinationError) as caught:
            keys(destination, prefix)
        assert f"/{link} is a symbolic link" in caught.value.detail
    assert keys(destination, "intents/") == []
