from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.engine.sql.client import Connection
from backupd.model.errors import DamagedError, KeyUnusableError, NotFoundError, RefusedError, ToolMissingError
from backupd.model.job import Progress
from backupd.model.proof import Phase
from backupd.process.run_context import RunContext, Stopwatch
from backupd.transfer.leases import pins
from backupd.transfer.records.encryption import Unsealer
from restore.datadir.staging import MARKER, read_marker, unfinished
from restore.datadir.start import forget_replication, remove_dead_folders, run_folder
from restore.fetch import sources
from restore.fetch.sources import Sources
from restore.whole_server import RestoreOutcome, RestoreSpec, execute
from storage import layout
from storage.destination import Destination
from tests.support import sample
from tests.support.ending import end, unmount
from tests.support.keys import Keys
from tests.support.restores.builder import files_below
from tests.support.restores.taken import Taken, take_backup
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_USER, PrivateServer, connect, query
from tests.support.servers.replica import replica_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restore gives files to the server's user")
ROOT = Path(__file__).parents[3]


def restore(taken: Taken, keys: Keys, spec: RestoreSpec, *destinations: Destination) -> RestoreOutcome:
    return execute(spec, sources_of(keys, *(destinations or [taken.destination])), RunContext())


def sources_of(keys: Keys, *destinations: Destination) -> Sources:
    return Sources(destinations, Unsealer(keys.secret_home))


@contextlib.contextmanager
def ended(outcome: RestoreOutcome) -> Iterator[RestoreOutcome]:
    """The server that the restore left running, gone afterwards."""
    try:
        yield outcome
    finally:
        assert outcome.started is not None
        end(outcome.started.pid)
        subprocess.run(["rm", "-rf", str(outcome.started.socket.parent)], check=True)


def opened_by(pid: int) -> set[str]:
    """Files that a process has open; what it closes meanwhile is none."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(str(link.readlink()))
    return found


@contextlib.contextmanager
def file_system(path: Path, size: str) -> Iterator[Path]:
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], check=True)
    try:
        yield path
    finally:
        unmount(path)


def test_a_restore_with_start_gives_a_checked_server_that_stays_up_deaf_and_mute(
    taken: Taken, keys: Keys, short_tmp: Path, shared_server: PrivateServer
) -> None:
    told: list[Phase] = []
    reported: dict[str, None] = {}
    before = files_below(taken.folder)
    spec = replace(taken.spec(short_tmp / "mysql", start=True), checks=("SELECT COUNT(*) FROM shop.orders",))
    with ended(
        execute(
            spec,
            sources_of(keys, taken.destination),
            RunContext(report=lambda progress: reported.setdefault(progress.phase), watch=Stopwatch(told.append)),
        )
    ) as outcome:
        assert outcome.is_good, outcome.checks
        assert outcome.tables_compared == len(taken.witness.checksums)
        assert [phase.name for phase in outcome.phases] == ["fetched", "prepared", "restored", "started", "verified"]
        assert [phase.name for phase in told] == ["fetched", "prepared", "restored", "started", "verified", "started"]
        assert list(reported) == ["fetch", "prepare", "place", "start", "verify"], "each is told when it begins"
        assert all(phase.seconds > 0 for phase in outcome.phases)
        assert outcome.started is not None
        # Its accounts count again, and nobody enters without one.
        with connect(outcome.started.socket, user=SERVICE_USER, password=SERVICE_PASSWORD) as connection:
            assert query(connection, "SELECT @@skip_networking, @@event_scheduler, @@log_bin") == [(1, "OFF", 0)]
            assert query(connection, "SELECT COUNT(*) FROM shop.orders") == [(5000,)]
        assert Path(f"/proc/{outcome.started.pid}/status").read_text().count("PPid:\t1\n") == 1
        with connect(outcome.started.socket) as connection, shared_server.connect() as source:
            assert sample.checksum_everything(connection) == sample.checksum_everything(source)
            assert sample.describe_everything(connection) == sample.describe_everything(source)
    assert files_below(taken.folder) == before
    assert sorted(path.name for path in short_tmp.iterdir()) == ["mysql"]
    assert read_marker(short_tmp / "mysql") is not None
    assert not any((short_tmp / "mysql").glob("xtrabackup_*"))
    assert pins(taken.destination) == []


def test_the_same_backup_restores_twice_onto_a_server_of_the_operators_own(
    taken: Taken, keys: Keys, short_tmp: Path, shared_server: PrivateServer
) -> None:
    for name in ("one", "two"):
        outcome = restore(taken, keys, taken.spec(short_tmp / name))
        assert outcome.started is None
        assert [phase.name for phase in outcome.phases] == ["fetched", "prepared", "restored"]
        with (
            PrivateServer(datadir=short_tmp / name) as server,
            server.connect() as copy,
            shared_server.connect() as source,
        ):
            assert sample.checksum_everything(copy) == sample.checksum_everything(source)


def test_a_mount_point_with_lost_and_found_is_restored_from_inside(
    taken: Taken, keys: Keys, short_tmp: Path, shared_server: PrivateServer
) -> None:
    with file_system(short_tmp / "mysql", "400m") as datadir:
        (datadir / "lost+found").mkdir(mode=0o700)
        restore(taken, keys, taken.spec(datadir))
        assert (datadir / "lost+found").is_dir()
        assert not (datadir / ".backupd-restoring").exists()
        server = PrivateServer(datadir=datadir, options={"ignore_db_dirs": "lost+found"})
        try:
            with server.start().connect() as copy, shared_server.connect() as source:
                assert sample.checksum_everything(copy) == sample.checksum_everything(source)
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("moment", "count", "mount"),
    [
        ("fetch", 5, False),
        ("fetch", 5, True),
        ("fetched", 1, False),
        ("prepare", 12, False),
        ("prepared", 1, False),
        ("rename", 1, False),
        ("rename", 3, True),
        ("restored", 1, True),
        ("restored", 1, False),
        ("started", 1, False),
        ("verify", 5, False),
        ("started", 2, False),
    ],
)
def test_after_a_kill_at_any_phase_the_same_call_goes_on_to_the_same_data(
    taken: Taken, keys: Keys, short_tmp: Path, moment: str, count: int, mount: bool
) -> None:
    with contextlib.ExitStack() as stack:
        datadir = short_tmp / "mysql"
        if mount:
            stack.enter_context(file_system(datadir, "400m"))
        victim = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.support.restores.victim",
                moment,
                str(count),
                str(taken.folder),
                taken.header.backup_id,
                str(keys.secret_home),
                str(datadir),
            ],
            cwd=ROOT,
            check=False,
            capture_output=True,
        )
        assert victim.returncode == -signal.SIGKILL, victim.stderr.decode()
        pending = unfinished(datadir)
        assert pending is not None
        assert (pending.target, pending.chain) == ("latest", (taken.header.backup_id,))
        outcome = stack.enter_context(ended(restore(taken, keys, taken.spec(datadir, start=True))))
        if (moment, count) != ("started", 2):  # then the server was up already and is only found again
            assert outcome.is_good, outcome.checks
            assert outcome.tables_compared == len(taken.witness.checksums)
        assert unfinished(datadir) is None
        assert [p.name for p in short_tmp.iterdir()] == ["mysql"]
        # What the killed process left at the destination is a dead pin: the next sweep takes it.
        assert len(pins(taken.destination)) <= 1
        for pin in pins(taken.destination):
            taken.destination.delete(pin.key)
        assert outcome.started is not None
        with connect(outcome.started.socket) as connection:
            assert query(connection, "SELECT COUNT(*) FROM shop.orders") == [(5000,)]


def test_an_unfinished_restore_of_another_backup_is_not_mixed_with_this_one(
    taken: Taken, keys: Keys, short_tmp: Path
) -> None:
    other = replace(taken.spec(short_tmp / "mysql"), chain=("20200101T000000Z-00000000",))
    victim = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.restores.victim",
            "fetch",
            "3",
            str(taken.folder),
            taken.header.backup_id,
            str(keys.secret_home),
            str(short_tmp / "mysql"),
        ],
        cwd=ROOT,
        check=False,
    )
    assert victim.returncode == -signal.SIGKILL
    with pytest.raises(RefusedError, match="unfinished restore") as refused:
        restore(taken, keys, other)
    assert f"backup:{taken.header.backup_id}" in refused.value.hint
    for pin in pins(taken.destination):
        taken.destination.delete(pin.key)


def test_refusals_come_before_the_first_byte_and_leave_nothing(
    taken: Taken, keys: Keys, short_tmp: Path, shared_server: PrivateServer
) -> None:
    def refused(datadir: Path, error: type[Exception], match: str, **changes: object) -> Exception:
        before = sorted(short_tmp.rglob("*"))
        with pytest.raises(error, match=match) as caught:
            restore(taken, keys, replace(taken.spec(datadir), **changes))  # type: ignore[arg-type]  # by name below
        assert sorted(short_tmp.rglob("*")) == before
        return caught.value

    refused(Path("/proc/no-such-place"), RefusedError, "No such file")
    refused(shared_server.datadir / "new", RefusedError, "inside the data directory of a server")
    refused(taken.folder / "servers/new", RefusedError, "in a repository")
    full = short_tmp / "full"
    full.mkdir()
    (full / "ibdata1").touch()
    refused(full, RefusedError, "not empty")
    refused(shared_server.datadir, RefusedError, "in use")
    refused(short_tmp / "mysql", RefusedError, "no user 'nobody-knows'", owner="nobody-knows")
    refused(short_tmp / "mysql", NotFoundError, "no backup", chain=("20200101T000000Z-00000000",))
    with file_system(short_tmp / "small", "100m") as small:
        told = refused(small, RefusedError, "not enough space")
        assert f"{sum(-(-e.size // 4096) * 4096 for e in taken.body.entries):,} bytes of files" in str(told)


def test_a_finished_restore_is_found_again_started_again_and_otherwise_named(
    taken: Taken, keys: Keys, short_tmp: Path
) -> None:
    spec = replace(taken.spec(short_tmp / "mysql", start=True), witness=None)
    first = restore(taken, keys, spec)
    repeated = replace(spec, restore_id=taken.spec(short_tmp).restore_id)
    again = restore(taken, keys, repeated)
    assert again.started == first.started
    assert (again.restore_id, again.phases) == (first.restore_id, ())
    assert any("was finished at" in warning for warning in again.warnings)
    with pytest.raises(RefusedError, match=f"restore {first.restore_id} was finished there at") as refused:
        restore(taken, keys, replace(repeated, start=False))
    assert "--start" in refused.value.hint
    assert f"--to backup:{spec.chain[-1]} finds or starts" in refused.value.hint
    other = replace(repeated, chain=("20200101T000000Z-00000000",), target="2026-11-21T09:41:03Z")
    with pytest.raises(RefusedError, match="was finished there") as refused:
        restore(taken, keys, other)
    assert "requested: backup 20200101T000000Z-00000000, target 2026-11-21T09:41:03Z" in refused.value.detail
    assert first.started is not None
    end(first.started.pid)
    with ended(restore(taken, keys, repeated)) as third:
        assert third.started is not None
        assert third.started.pid != first.started.pid
        with connect(third.started.socket) as connection:
            assert query(connection, "SELECT COUNT(*) FROM shop.orders") == [(5000,)]
    plain = restore(taken, keys, taken.spec(short_tmp / "plain"))
    with pytest.raises(RefusedError, match=plain.restore_id):
        restore(taken, keys, taken.spec(short_tmp / "plain", start=True))


def test_folders_of_servers_that_no_longer_run_are_removed_and_no_others(
    monkeypatch: pytest.MonkeyPatch, short_tmp: Path
) -> None:
    base = short_tmp / "run"
    base.mkdir(mode=0o711)
    monkeypatch.setenv("BACKUPD_RUNTIME", str(base))
    for name in ("server-0000dead", "server-0000dead-look", "server-0000a11e", "server-of-somebody"):
        (base / name).mkdir()
    alive = base / "server-0000a11e/my.cnf"
    command = [sys.executable, "-c", "print(flush=True); input()", f"--defaults-file={alive}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        # Right after Popen returns the kernel may still show an empty command line.
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        assert remove_dead_folders() == ("server-0000dead", "server-0000dead-look")
        process.communicate(b"\n")
    assert remove_dead_folders() == ("server-0000a11e",)
    assert (base / "server-of-somebody").is_dir()


def test_without_the_private_key_it_stops_before_anything_is_written(taken: Taken, keys: Keys, short_tmp: Path) -> None:
    with pytest.raises(KeyUnusableError, match="no secret key"):
        execute(taken.spec(short_tmp / "mysql"), Sources([taken.destination], Unsealer(keys.public_home)), RunContext())
    assert list(short_tmp.iterdir()) == []


@pytest.mark.parametrize("program", ["mariadbd", "mariadb-backup"])
def test_programs_of_another_series_or_missing_ones_are_refused(
    taken: Taken, keys: Keys, short_tmp: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    other = short_tmp / "bin" / program
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho 'mariadbd  Ver 11.4.2-MariaDB based on MariaDB server 11.4.2-MariaDB'\n")
    other.chmod(0o755)
    if program == "mariadbd":  # its other name would be found
        (other.parent / "mysqld").symlink_to(other)
    monkeypatch.setenv("PATH", f"{other.parent}:{os.environ['PATH']}")
    with pytest.raises(RefusedError, match=r"11\.4\.2"):
        restore(taken, keys, taken.spec(short_tmp / "mysql", start=True))
    assert [path.name for path in short_tmp.iterdir()] == ["bin"]
    facts = taken.body.facts
    with pytest.raises(ToolMissingError):
        sources.find_programs(facts, start=True, paths={program: "/nonexistent/program"})
    if program == "mariadbd":
        assert sources.find_programs(facts, start=False, paths={program: "/nonexistent/program"}).server is None


def test_a_second_restore_into_the_same_directory_is_refused_while_the_first_is_at_work(
    taken: Taken, keys: Keys, short_tmp: Path
) -> None:
    tried = []

    def report(progress: Progress) -> None:
        if progress.phase in ("fetch", "prepare") and progress.phase not in tried:
            tried.append(progress.phase)
            with pytest.raises(RefusedError, match="another restore is running"):
                restore(taken, keys, taken.spec(short_tmp / "mysql"))
            assert [pin.backups for pin in pins(taken.destination)] == [(("shop", taken.header.backup_id),)]

    execute(taken.spec(short_tmp / "mysql"), sources_of(keys, taken.destination), RunContext(report=report))
    assert tried == ["fetch", "prepare"]


def test_damage_is_named_and_another_copy_continues_the_same_restore(taken: Taken, keys: Keys, short_tmp: Path) -> None:
    bad = taken.copy(short_tmp / "bad")
    largest = max(taken.header.objects, key=lambda item: item.size)
    path = bad.folder / layout.object_key(largest.name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)
    spec = taken.spec(short_tmp / "mysql")
    with pytest.raises(DamagedError) as damaged:
        restore(taken, keys, spec, bad.destination)
    assert largest.name in damaged.value.damages[0]
    assert not (short_tmp / "mysql").exists()
    (bad.folder / layout.manifest_key("shop", taken.header.backup_id)).write_bytes(b"{}")
    outcome = restore(taken, keys, spec, bad.destination, taken.destination)
    assert any("manifest.json" in warning for warning in outcome.warnings)
    assert any(largest.name in warning for warning in outcome.warnings)
    with PrivateServer(datadir=short_tmp / "mysql") as server:
        assert server.scalar("SELECT COUNT(*) FROM shop.orders") == 5000


@pytest.mark.parametrize("mount", [False, True])
def test_tables_from_outside_get_a_place_of_their_own_beside_their_living_source(
    keys: Keys, short_tmp: Path, mount: bool
) -> None:
    elsewhere = short_tmp / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    with PrivateServer() as source, contextlib.ExitStack() as stack:
        source.create_backup_users()
        source.execute(
            "CREATE DATABASE d",
            f"CREATE TABLE d.far (a INT PRIMARY KEY) DATA DIRECTORY='{elsewhere}'",
            "CREATE TABLE d.near (a INT PRIMARY KEY)",
            "INSERT INTO d.far VALUES (1), (2), (3)",
        )
        taken = take_backup(source, keys, short_tmp / "repository")
        datadir = short_tmp / "mysql"
        if mount:
            stack.enter_context(file_system(datadir, "400m"))
        outcome = stack.enter_context(ended(restore(taken, keys, taken.spec(datadir, start=True))))
        assert outcome.is_good, outcome.checks
        assert any("DATA DIRECTORY" in warning for warning in outcome.warnings)
        assert (short_tmp / "mysql.external/1/d/far.ibd").is_file()
        assert outcome.started is not None
        opened = opened_by(outcome.started.pid)
        assert str(datadir / "ibdata1") in opened
        assert not [path for path in opened if path.startswith((str(elsewhere), str(source.datadir)))]
        with connect(outcome.started.socket) as connection:
            query(connection, "INSERT INTO d.far VALUES (4)")
            query(connection, "ALTER TABLE d.far ADD COLUMN b INT, FORCE")
            assert query(connection, "SELECT COUNT(*) FROM d.far") == [(4,)]
        assert source.scalar("SELECT COUNT(*) FROM d.far") == 3
        assert source.query("CHECK TABLE d.far")[0][3] == "OK"


def test_a_copy_of_a_replica_connects_nowhere(keys: Keys, short_tmp: Path) -> None:
    with PrivateServer(tcp=True) as source:
        source.execute("CREATE DATABASE d", "CREATE TABLE d.t (a INT PRIMARY KEY)", "INSERT INTO d.t VALUES (1)")
        source.create_backup_users()
        with replica_of(source) as replica:
            taken = take_backup(replica, keys, short_tmp / "repository")
            dumps = source.scalar("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE COMMAND = 'Binlog Dump'")
            source.execute("INSERT INTO d.t VALUES (2)")
            with ended(restore(taken, keys, taken.spec(short_tmp / "mysql", start=True))) as outcome:
                assert outcome.started is not None
                with connect(outcome.started.socket) as connection:
                    assert query(connection, "SHOW ALL SLAVES STATUS") == []
                    assert query(connection, "SELECT COUNT(*) FROM d.t") == [(1,)]
            kept = restore(taken, keys, taken.spec(short_tmp / "kept", replica=True))
            assert any("follow the source" in text and "MASTER_USE_GTID=slave_pos" in text for text in kept.warnings)
            assert "Repl-s3cret" not in str(kept.warnings)
            assert dumps == source.scalar(
                "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE COMMAND = 'Binlog Dump'"
            )


def test_every_replication_connection_is_forgotten_whatever_its_name(taken: Taken) -> None:
    with PrivateServer() as server:
        for port, name in enumerate(("", "second", "it's"), start=1):
            server.query("CHANGE MASTER %s TO MASTER_HOST='127.0.0.1', MASTER_PORT=%s, MASTER_USER='u'", (name, port))
        forget_replication(Connection(socket=str(server.socket), user="root"), taken.body.facts.server)
        assert server.query("SHOW ALL SLAVES STATUS") == []
        assert list(server.datadir.glob("master*.info")) == []


def test_the_folder_of_a_started_server_is_the_same_for_every_attempt() -> None:
    assert run_folder("20261121T040000Z-0000dead") == run_folder("20261121T040000Z-0000dead")
    assert run_folder("20261121T040000Z-0000dead") != run_folder("20261121T040000Z-0000beef")
    assert MARKER.startswith(".")
