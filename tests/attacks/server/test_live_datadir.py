"""The database's user owns what a physical backup reads: its folder of plugins, and whatever lies in its datadir."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from backupd.backup.finding import Severity
from backupd.backup.server_checks import examine_owners
from backupd.engine.physical import live_datadir as livedata
from backupd.engine.physical.capture import CaptureRequest
from backupd.engine.physical.live_datadir import reader_of, survey
from backupd.engine.physical.mariabackup_xtrabackup import MariaBackup
from backupd.engine.server import sandbox as handover
from backupd.engine.server.backup_files import XTRABACKUP
from backupd.engine.server.probe import probe
from backupd.engine.server.sandbox import is_available
from backupd.engine.sql.client import Connection, Session
from backupd.model.errors import RefusedError, ToolError
from backupd.process.folders import powers_of
from tests.support.hostile.evil_library import MARK, evil_library
from tests.support.servers.backups import Taken, connection_to, take, the_tool
from tests.support.servers.mariadb import PrivateServer
from tests.support.service.systemd_unit import confined
from tests.support.stores.folders import runs_as_root

pytestmark = pytest.mark.skipif(not runs_as_root(), reason="only root can be another user than the database's")

LIBRARY = "file_key_management.so"
SECRET = "root's own"


def _as_mysql(script: str) -> None:
    subprocess.run(["sh", "-ec", script], check=True, user="mysql", group="mysql", cwd="/")


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateServer]:
    with PrivateServer(options={"symbolic_links": 1}, tcp=True) as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.t (i INT PRIMARY KEY)",
            "CREATE TABLE shop.leak (i INT NOT NULL) ENGINE=CSV",
        )
        yield server


@pytest.fixture
def secret(server: PrivateServer) -> Iterator[Path]:
    """A file of root's that nobody else may read, on the file system of the data directory."""
    path = server.base / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    yield path
    path.unlink()


# -- what the server has the tool load


@pytest.fixture
def evil(short_tmp: Path) -> Iterator[PrivateServer]:
    """Its user has put another library in the place of its encryption plugin, which the server has loaded."""
    plugins, keys = short_tmp / "plugins", short_tmp / "keys"
    _as_mysql(f"mkdir {plugins}; echo '1;{'ab' * 32}' > {keys}; cp /usr/lib/mysql/plugin/{LIBRARY} {plugins}")
    options: dict[str, str | int | None] = {
        "plugin_dir": str(plugins),
        "plugin_load_add": "file_key_management",
        "file_key_management_filename": str(keys),
    }
    with PrivateServer(options=options) as server:
        server.create_backup_users()
        (short_tmp / "evil").write_bytes(evil_library())
        _as_mysql(f"rm {plugins}/{LIBRARY}; cp {short_tmp}/evil {plugins}/{LIBRARY}")
        yield server


def _loaded(taken: Taken) -> bool:
    return any("Can't find symbol" in line for line in taken.log)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the evil library is for x86-64")
def test_a_library_of_the_server_runs_as_its_own_user(
    evil: PrivateServer, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_available():
        assert _loaded(take(evil, short_tmp / "confined"))
        assert not (evil.datadir / MARK).exists()  # and can write nowhere
    monkeypatch.setattr(handover, "can_confine", lambda _program: False)
    assert _loaded(take(evil, short_tmp / "plain"))
    assert (evil.datadir / MARK).owner() == "mysql"


def test_nothing_else_of_the_host_can_be_seen_or_written(server: PrivateServer, short_tmp: Path) -> None:
    home, program, work = short_tmp / "home", short_tmp / "bin/tool", short_tmp / "work"
    for folder in (home, program.parent, work):
        folder.mkdir()
    (home / "open").touch()
    program.write_text(f"""#!/bin/sh
case "$*" in *--backup*) ;; *) exec {the_tool().tool.path} "$@";; esac
(id -un; grep -E 'CapEff|CapPrm|NoNewPrivs' /proc/self/status; ulimit -c; ls -d {server.datadir}/ibdata1
ls -d {home} /home /root; touch {server.datadir}/x {home}/x; echo "$(ls /proc | grep -c '^[0-9]') processes") 1>&2
exit 1
""")
    program.chmod(0o755)
    log: list[str] = []
    tool = MariaBackup(replace(the_tool().tool, path=str(program)), XTRABACKUP)
    request = CaptureRequest(connection_to(server), work, on_stderr=log.append)
    with tool.capture(request) as capture, pytest.raises(ToolError):
        list(capture.events())
    said = [" ".join(line.split()) for line in log]
    none = "0" * 16
    assert said[:4] == ["mysql", f"CapPrm: {none}", f"CapEff: {none}", "NoNewPrivs: 1"]
    assert said[4:6] == ["0", f"{server.datadir}/ibdata1"]
    if is_available():
        assert len([line for line in said if "No such file" in line]) == 4  # three folders, and one to write in
        assert any("Read-only" in line for line in said)
        assert int(said[-1].split()[0]) < 10


class _Answering:
    """A session with a server of this user."""

    connection = Connection(socket="/run/some.sock")

    def __init__(self, uid: int | None) -> None:
        self.server_uid = uid


def _reader_of(datadir: Path, uid: int | None) -> str | None:
    return reader_of(datadir, cast("Session", _Answering(uid)))


def test_a_datadir_of_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="belongs to root"):
        _reader_of(tmp_path, 0)


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000, "/proc/self/mem/x", "/nonexistent"])
def test_a_datadir_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(RefusedError, match="data directory"):
        _reader_of(Path(name), 0)


def test_a_user_without_a_name_is_one(tmp_path: Path) -> None:
    os.chown(tmp_path, 54321, 54322)
    assert _reader_of(tmp_path, 54321) == "54321:54322"
    assert _reader_of(tmp_path, 0) == "54321:54322"  # systemd has opened its socket


def test_nothing_is_read_as_a_user_who_is_not_the_servers(server: PrivateServer, short_tmp: Path) -> None:
    """What reads loads libraries that the server names: as whoever owns the folder that it calls its data directory."""
    os.chown(short_tmp, 54321, 54322)
    server.create_user("tcp", "s", ["PROCESS"])
    server.execute("CREATE USER tcp@127.0.0.1 IDENTIFIED BY 's'")
    over_tcp = Connection(host="127.0.0.1", port=server.port or 0, user="tcp", password="s")
    for connection in (connection_to(server), over_tcp):
        with connection.connect() as session:
            assert session.server_uid == pwd.getpwnam("mysql").pw_uid
            assert reader_of(server.datadir, session) == "mysql"
            with pytest.raises(RefusedError, match="is a process of user mysql"):
                reader_of(short_tmp, session)
    with pytest.raises(RefusedError, match="is not a process of this host"):
        _reader_of(server.datadir, None)


# -- what lies in the data directory


def _refused(server: PrivateServer, place: Path) -> str:
    with pytest.raises(RefusedError) as caught:
        take(server, place / "taken")
    assert list((place / "taken").rglob("*")) == []
    connection = connection_to(server)
    info = probe(connection)
    with connection.connect() as session:
        (found,) = examine_owners(session, info, "mariadb-backup")
        assert list(examine_owners(session, info, "clone")) == []
    assert found.severity is Severity.ERROR
    assert caught.value.detail in found.message
    return caught.value.detail


@pytest.mark.parametrize(
    ("name", "made", "told"),
    [
        ("shop/leak.CSV", "ln -sf {secret} {path}", "shop/leak.CSV is a link to {secret}, a file of user root"),
        ("shop/other.MYD", "ln -s {secret} {path}", "shop/other.MYD is a link to {secret}, a file of user root"),
        ("ibdata9", "ln -s {secret} {path}", "ibdata9 is a link to {secret}, a file of user root"),
        ("stolen", "ln -s /etc {path}", "stolen is a link to /etc, a folder of user root"),
        ("shop/pipe.MYI", "mkfifo {path}", "shop/pipe.MYI is a pipe"),
        ("shop/far.isl", "printf %s {secret} > {path}", "shop/far.isl leads to {secret}, a file of user root"),
    ],
)
def test_a_link_to_a_file_of_somebody_else_is_refused_by_name(
    server: PrivateServer, secret: Path, short_tmp: Path, name: str, made: str, told: str
) -> None:
    path = server.datadir / name
    kept = path.read_bytes() if path.is_file() else None
    _as_mysql(made.format(secret=secret, path=path))
    try:
        assert _refused(server, short_tmp) == told.format(secret=secret)
    finally:
        path.unlink()
        if kept is not None:
            path.write_bytes(kept)
            shutil.chown(path, "mysql", "mysql")


def test_a_second_name_of_somebody_elses_file_is_refused(server: PrivateServer, secret: Path, short_tmp: Path) -> None:
    path = server.datadir / "shop/hard.CSV"
    os.link(secret, path)  # which the kernel forbids the database's user where fs.protected_hardlinks is 1
    try:
        assert _refused(server, short_tmp) == "shop/hard.CSV belongs to user root and has 2 names"
        secret.chmod(0o644)
        assert survey(server.datadir).foreign
    finally:
        path.unlink()


def test_every_one_is_named(server: PrivateServer, secret: Path) -> None:
    names = [f"shop/x{number:02}.TRG" for number in range(60)]
    try:
        for name in names:
            (server.datadir / name).symlink_to(secret)
        with pytest.raises(RefusedError) as caught:
            survey(server.datadir).refuse()
    finally:
        for name in names:
            (server.datadir / name).unlink(missing_ok=True)
    assert caught.value.detail.splitlines()[49:] == [
        f"shop/x49.TRG is a link to {secret}, a file of user root",
        "and 10 more",
    ]


def test_a_link_that_comes_later_is_not_followed_by_root(
    server: PrivateServer, secret: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the copy."""
    path = server.datadir / "shop/late.CSV"
    _as_mysql(f"ln -s {secret} {path}")
    monkeypatch.setattr(livedata.Survey, "refuse", lambda _self: None)
    try:
        taken = take(server, short_tmp / "taken")
        assert not any(SECRET.encode() in file.read_bytes() for file in taken.base.rglob("*") if file.is_file())
    finally:
        path.unlink()


def test_what_belongs_to_a_server_is_taken_from_wherever_it_is(server: PrivateServer, short_tmp: Path) -> None:
    """DATA DIRECTORY, links of MyISAM, a schema on another disk through a link to a link, lost+found of root, what
    an upgrade as root left, and a link of no table."""
    for name in ("far", "disk/linked", "old"):
        (short_tmp / name).mkdir(parents=True)
        shutil.chown(short_tmp / name, "mysql", "mysql")
    old = short_tmp / "old"
    (short_tmp / "mnt").symlink_to(short_tmp / "disk")
    (server.datadir / "linked").symlink_to(short_tmp / "mnt/linked")
    (server.datadir / "lost+found").mkdir(mode=0o700)
    (server.datadir / "mysql_upgrade_info").write_text("10.11")
    (server.datadir / "server.sock").symlink_to("/etc/shadow")
    (server.datadir / "shop/db.opt").chmod(0o644)
    os.chown(server.datadir / "shop/db.opt", 0, 0)  # restored by hand, and chown was forgotten: all may read it
    server.execute(
        "CREATE TABLE linked.t (i INT PRIMARY KEY)",
        "CREATE TABLE linked.m (i INT) ENGINE=MyISAM",
        "CREATE DATABASE `lost+found`",
        "CREATE TABLE `lost+found`.t (i INT PRIMARY KEY)",
        f"CREATE TABLE shop.far (i INT PRIMARY KEY) DATA DIRECTORY='{short_tmp}/far'",
        f"CREATE TABLE shop.old (i INT) ENGINE=MyISAM DATA DIRECTORY='{old}' INDEX DIRECTORY='{old}'",
    )
    server.restart()
    try:
        taken = take(server, short_tmp / "taken")
    finally:
        server.execute("DROP TABLE shop.far", "DROP TABLE shop.old", "DROP DATABASE `lost+found`")
    assert {
        "linked/t.ibd",
        "linked/m.MYD",
        "shop/far.ibd",
        "shop/far.isl",
        "shop/old.MYD",
        "shop/old.MYI",
        "shop/db.opt",
        "lost@002bfound/t.ibd",
    } <= taken.sizes.keys()
    assert "shadow" not in "".join(taken.sizes)


# -- less power than root has

TAKING = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
from backupd.backup.server_checks import examine_owners
from backupd.engine.server.probe import probe
from backupd.model.errors import BackupdError
from tests.support.servers.backups import connection_to, take
os.umask(0o022)
server = SimpleNamespace(socket=sys.argv[1])
connection = connection_to(server)
with connection.connect() as session:
    found = [finding.message for finding in examine_owners(session, probe(connection), "mariadb-backup")]
try:
    told = sorted(take(server, Path(sys.argv[2])).sizes)
except BackupdError as error:
    told = error.hint
print(json.dumps([found, told]))
"""


def _taken_under(words: Sequence[str], server: PrivateServer, base: Path) -> tuple[list[str], str]:
    """What is found before a backup, and what comes of it."""
    env = {**os.environ, "BACKUPD_RUNTIME": str(base / "run/backupd")}
    done = subprocess.run(
        [*words, sys.executable, "-c", TAKING, str(server.socket), str(base / "var/lib/backupd/b")],
        env=env,
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        check=True,
    )
    found, told = json.loads(done.stdout)
    return found, str(told)


@pytest.fixture
def far(server: PrivateServer, short_tmp: Path) -> Iterator[Path]:
    """The schema's folder of a table with a DATA DIRECTORY."""
    (short_tmp / "far").mkdir()
    shutil.chown(short_tmp / "far", "mysql", "mysql")
    server.execute(
        "CREATE DATABASE elsewhere", f"CREATE TABLE elsewhere.t (i INT PRIMARY KEY) DATA DIRECTORY='{short_tmp}/far'"
    )
    yield server.datadir / "elsewhere"
    server.execute("DROP DATABASE elsewhere")


@pytest.mark.skipif(not is_available(), reason="bubblewrap cannot confine anything on this host")
def test_tables_elsewhere_need_a_folder_more_under_the_unit(server: PrivateServer, far: Path, short_tmp: Path) -> None:
    for number, named in enumerate(((), ("--bind", str(far), str(far)))):
        base = short_tmp / f"unit{number}"
        base.mkdir(mode=0o711)
        words = confined(base)
        at = words.index("--chdir")
        words = [*words[:at], *named, "--chdir", str(Path(__file__).parents[3]), *words[at + 2 :]]
        found, told = _taken_under(words, server, base)
        if named:
            assert found == []
            assert "elsewhere/t.isl" in told
        else:
            assert "ReadWritePaths=" in told
            assert [str(far) in finding and "DATA DIRECTORY" in finding for finding in found] == [True]


def test_a_schema_that_the_service_cannot_enter_is_no_empty_one(server: PrivateServer) -> None:
    """MariaDB makes folders for itself alone: with an ACL that is to be inherited, too, its mask leaves nothing."""
    subprocess.run(["setfacl", "-R", "-m", "u:nobody:rX", server.datadir], check=True)
    subprocess.run(["setfacl", "-R", "-d", "-m", "u:nobody:rX", server.datadir], check=True)
    try:
        with powers_of("nobody"):
            survey(server.datadir).refuse()
        server.execute("CREATE DATABASE later", "CREATE TABLE later.t (i INT PRIMARY KEY)")
        with powers_of("nobody"), pytest.raises(RefusedError, match="cannot be read"):
            survey(server.datadir)
    finally:
        server.execute("DROP DATABASE IF EXISTS later")
        subprocess.run(["setfacl", "-R", "-b", server.datadir], check=True)
