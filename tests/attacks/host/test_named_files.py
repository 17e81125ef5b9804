"""Files of the host that a database server, or its user, names: root looks at them with that user's powers only."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from backupd.backup.host_configuration import collect, find_process
from backupd.engine.physical.datafiles import find_external
from backupd.engine.physical.imported_tables import has_old_pages
from backupd.engine.physical.tablespace_transport import _Files
from backupd.engine.server.binary_logs import log_digest
from backupd.engine.server.launch import log_tail
from backupd.engine.server.probe import probe
from backupd.model.errors import DamagedError
from backupd.model.server_facts import Position
from backupd.process.folders import powers_of
from restore.datadir.occupancy import refuse_links
from tests.support.servers.backups import connection_to
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import runs_as_root

pytestmark = pytest.mark.skipif(not runs_as_root(), reason="only root can be another user than the database's")

SECRET = "root's own"
FILES = "host/files"


def _as_mysql(script: str) -> None:
    subprocess.run(["sh", "-ec", script], check=True, user="mysql", group="mysql", extra_groups=[], cwd="/")


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateServer]:
    with PrivateServer() as server:
        server.create_backup_users()
        yield server


@pytest.fixture
def secret(short_tmp: Path) -> Path:
    """A file of root's in a folder that nobody else enters."""
    folder = short_tmp / "closed"
    folder.mkdir(mode=0o700)
    path = folder / "secret.cnf"
    path.write_text(f"[mysqld]\nreport_password = {SECRET}\n")
    return path


def _collected(server: PrivateServer) -> tuple[dict[str, str], str]:
    connection = connection_to(server)
    found = collect(connection, probe(connection))
    with tarfile.open(fileobj=io.BytesIO(found.content)) as tar:
        texts = {
            member.name: (tar.extractfile(member) or io.BytesIO()).read().decode("utf-8", "replace")
            for member in tar
            if member.isfile()
        }
    return texts, " ".join(found.warnings)


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_settings_that_the_server_wrote_are_no_other_file(server: PrivateServer, secret: Path, mode: int) -> None:
    secret.chmod(mode)  # the folder above is closed in any case
    path = server.datadir / "mysqld-auto.cnf"
    _as_mysql(f"ln -s {secret} {path}")
    try:
        texts, warnings = _collected(server)
    finally:
        path.unlink()
    assert SECRET not in str(texts)
    assert f"{secret} is not kept: Permission denied" in warnings


def test_an_option_file_that_the_server_names_is_no_other_file(server: PrivateServer, secret: Path) -> None:
    """Its command line names it, and it lies in a folder of its user."""
    words = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")
    path = next(Path(os.fsdecode(word.partition(b"=")[2])) for word in words if word.startswith(b"--defaults-file="))
    kept = path.read_bytes()
    path.unlink()
    path.symlink_to(secret)
    try:
        texts, warnings = _collected(server)
    finally:
        path.unlink()
        path.write_bytes(kept)
    assert SECRET not in str(texts)
    assert "Permission denied (tried as user mysql" in warnings


@pytest.mark.parametrize("made", ["mkfifo {path}", "ln -s /dev/zero {path}"])
def test_a_file_without_an_end_is_not_read(server: PrivateServer, made: str) -> None:
    path = server.datadir / "mysqld-auto.cnf"
    _as_mysql(made.format(path=path))
    try:
        texts, _warnings = _collected(server)
    finally:
        path.unlink()
    assert f"{FILES}{path}" not in texts


def test_files_that_the_server_names_hold_nobody_up(server: PrivateServer, short_tmp: Path) -> None:
    """A pipe in the place of each: who opens it waits for ever."""
    _as_mysql(f"mkfifo {server.datadir}/pipe.000001")
    pipe = server.datadir / "pipe.000001"
    info = probe(connection_to(server))
    lying = replace(info, variables={**info.variables, "pid_file": str(pipe), "log_bin_basename": str(pipe)[:-7]})
    try:
        with connection_to(server).connect() as session:
            assert find_process(session, lying).pid == server.pid
        kernel = replace(lying, variables={**info.variables, "log_bin_basename": "/proc/x"})
        with pytest.raises(PermissionError):  # a file by its kind; who reads it waits for the kernel's next message
            log_digest(kernel, Position(file="kmsg", pos=4))
        for attempt in (
            lambda: log_digest(lying, Position(file=pipe.name, pos=4)),
            lambda: has_old_pages(pipe, lsn=1, page_size=16384),
        ):
            with pytest.raises(OSError, match="not a regular file"):
                attempt()
    finally:
        pipe.unlink()


@pytest.mark.parametrize("made", ["ln -s {secret} {path}", "mkfifo {path}"])
def test_the_log_of_a_copy_is_no_other_file(secret: Path, short_tmp: Path, made: str) -> None:
    short_tmp.chmod(0o777)
    path = short_tmp / "error.log"
    _as_mysql(made.format(secret=secret, path=path))
    told = log_tail(path)
    assert SECRET not in told
    assert "cannot be read" in told


def test_what_a_program_left_in_a_copy_is_not_read(secret: Path, short_tmp: Path) -> None:
    (short_tmp / "copy/shop").mkdir(parents=True)
    (short_tmp / "copy/shop/t.ibd").touch()
    (short_tmp / "copy/shop/t.isl").symlink_to(secret)
    with pytest.raises(DamagedError) as caught:
        find_external(short_tmp / "copy")
    assert SECRET not in str(caught.value) + caught.value.detail
    (short_tmp / "copy/shop/t.isl").unlink()
    os.mkfifo(short_tmp / "copy/shop/t.isl")
    with pytest.raises(DamagedError, match="pipes"):
        refuse_links(short_tmp / "copy")


def test_a_tablespace_is_put_where_the_server_itself_may_write(server: PrivateServer, short_tmp: Path) -> None:
    """Between the look and the copy its user has the schema's folder lead elsewhere."""
    server.execute("CREATE DATABASE moved")
    (short_tmp / "root").mkdir(mode=0o755)
    (short_tmp / "t.ibd").write_bytes(b"rows")
    (short_tmp / "t.cfg").write_bytes(b"notes")
    folder = server.datadir / "moved"
    _as_mysql(f"rm -r {folder}; ln -s {short_tmp}/root {folder}")
    try:
        with pytest.raises(PermissionError), _Files(server.datadir, Event()) as files:
            files.put(short_tmp / "t.ibd", folder / "t")
        assert list((short_tmp / "root").iterdir()) == []
        (short_tmp / "root/t.ibd.backupd").touch()  # nor is anything removed there
        with pytest.raises(PermissionError), _Files(server.datadir, Event()) as files:
            files.put(short_tmp / "t.ibd", folder / "t")
        assert (short_tmp / "root/t.ibd.backupd").exists()
    finally:
        folder.unlink()


def test_powers_are_given_back(secret: Path) -> None:
    own = Path("/proc/thread-self/status").read_text()
    with pytest.raises(PermissionError), powers_of("mysql"):
        secret.read_bytes()
    assert SECRET in secret.read_text()
    keys = ("Uid:", "Gid:", "Groups:", "CapEff:")
    now = Path("/proc/thread-self/status").read_text()
    assert [line for line in now.splitlines() if line.startswith(keys)] == [
        line for line in own.splitlines() if line.startswith(keys)
    ]


def test_who_looked_as_somebody_else_still_ends_with_its_parent_and_shows_its_memory_to_nobody() -> None:
    """The kernel takes the signal of a parent's end from a thread that becomes somebody else; the jobs of a service
    that was killed would go on."""
    done = subprocess.run(
        ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", _POWERS], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["9", "0", "9", "0", "1"]


_POWERS = """
import ctypes
from backupd.process.folders import powers_of
c, number = ctypes.CDLL(None), ctypes.c_int()
def show():
    c.prctl(2, ctypes.byref(number), 0, 0, 0)
    print(number.value, c.prctl(3, 0, 0, 0, 0))
c.prctl(4, 0, 0, 0, 0)
show()
with powers_of("nobody"):
    pass
show()
c.prctl(4, 1, 0, 0, 0)
with powers_of("nobody"):
    pass
print(c.prctl(3, 0, 0, 0, 0))
"""
