"""Tables with DATA DIRECTORY, restored on the host where their source is alive."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.engine.physical.datafiles import ExternalTablespace, assert_local, find_external, remap
from backupd.engine.server.launch import LaunchedServer, ServerConfig, options_for_copy
from backupd.engine.toolset import find_tool
from backupd.model.errors import DamagedError, RefusedError
from backupd.process.pipeline import run
from tests.support.logs.stream import write_files
from tests.support.servers.backups import MEMORY, Taken, give_to_database, give_to_worker, prepare, take, the_tool
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import give_to_database as own
from tests.support.stores.folders import short_directory

TABLES = ("shop.one", "shop.two", "shop.parts")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture(scope="module")
def source(place: Path) -> Iterator[PrivateServer]:
    """A server with tables on two other folders; it stays alive while copies of it are started."""
    elsewhere = place / "elsewhere"
    for folder in (elsewhere, elsewhere / "a", elsewhere / "b", elsewhere / "undo"):
        folder.mkdir()
        own(folder)
    undo: dict[str, str | int | None] = {"innodb_undo_tablespaces": 3, "innodb_undo_directory": str(elsewhere / "undo")}
    with PrivateServer(options=undo) as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE shop",
            f"CREATE TABLE shop.one (i INT PRIMARY KEY, v CHAR(50)) DATA DIRECTORY='{elsewhere}/a'",
            f"CREATE TABLE shop.two (i INT PRIMARY KEY) DATA DIRECTORY='{elsewhere}/b'",
            "CREATE TABLE shop.parts (i INT PRIMARY KEY) PARTITION BY RANGE (i)"
            f" (PARTITION p0 VALUES LESS THAN (100) DATA DIRECTORY='{elsewhere}/a',"
            f"  PARTITION p1 VALUES LESS THAN MAXVALUE DATA DIRECTORY='{elsewhere}/b')",
            f"CREATE TABLE shop.my (i INT) ENGINE=MyISAM DATA DIRECTORY='{elsewhere}/a'",
            "INSERT INTO shop.one SELECT seq, 'x' FROM mysql.seq_1_to_2000",
            "INSERT INTO shop.two SELECT seq FROM mysql.seq_1_to_50",
            "INSERT INTO shop.parts SELECT seq FROM mysql.seq_1_to_200",
            "INSERT INTO shop.my VALUES (1), (2)",
        )
        yield server


@pytest.fixture(scope="module")
def taken(source: PrivateServer, place: Path) -> Taken:
    return take(source, place / "taken")


def _seen(folder: Path) -> dict[str, tuple[int, str]]:
    """Content and last access of every file: what nobody opens keeps both."""
    return {
        str(path): (path.stat().st_atime_ns, hashlib.sha256(_read_quietly(path)).hexdigest())
        for path in folder.rglob("*.ibd")
    }


def _read_quietly(path: Path) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOATIME), "rb") as file:
        return file.read()


def test_a_backup_tells_which_tablespaces_lay_elsewhere(taken: Taken, place: Path) -> None:
    elsewhere = place / "elsewhere"
    found = find_external(taken.base)
    assert found == (
        ExternalTablespace("shop/one.isl", "shop/one.ibd", f"{elsewhere}/a/shop/one.ibd"),
        ExternalTablespace("shop/parts#P#p0.isl", "shop/parts#P#p0.ibd", f"{elsewhere}/a/shop/parts#P#p0.ibd"),
        ExternalTablespace("shop/parts#P#p1.isl", "shop/parts#P#p1.ibd", f"{elsewhere}/b/shop/parts#P#p1.ibd"),
        ExternalTablespace("shop/two.isl", "shop/two.ibd", f"{elsewhere}/b/shop/two.ibd"),
    )
    assert found[0].source_folder == f"{elsewhere}/a"
    assert (taken.base / "shop/my.MYD").stat().st_size > 0
    with pytest.raises(RefusedError, match="are outside of it"):
        assert_local(taken.base, taken.base)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_prepare_opens_nothing_outside_of_the_backup(taken: Taken, place: Path) -> None:
    base = taken.copy(place / "traced")
    (step,) = the_tool().prepare(base, memory=MEMORY)
    trace = place / "trace"
    before = _seen(place / "elsewhere")
    subprocess.run(
        ["strace", "-f", "-qq", "-e", "trace=%file", "-o", str(trace), *step.plain.argv],
        cwd=base,
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    touched = [line for line in trace.read_text().splitlines() if str(place / "elsewhere") in line]
    assert touched == []
    assert _seen(place / "elsewhere") == before


def test_a_copy_with_remapped_tablespaces_works_wholly_and_leaves_its_source_alone(
    source: PrivateServer, taken: Taken, place: Path
) -> None:
    base = taken.copy(place / "restored")
    the_tool().verify_prepared(base, taken.receipts, prepare(base))
    store = place / "restored-external"
    moved = remap(base, store=store)
    assert len(moved) == 4
    assert_local(base, store)
    assert sorted(path.relative_to(store).as_posix() for path in store.rglob("*.ibd")) == [
        "1/shop/one.ibd",
        "1/shop/parts#P#p0.ibd",
        "2/shop/parts#P#p1.ibd",
        "2/shop/two.ibd",
    ]
    give_to_database(base)
    give_to_database(store)
    expected: dict[str, int] = dict(source.query(f"CHECKSUM TABLE {', '.join(TABLES)}, shop.my"))
    source.execute("FLUSH TABLES")
    before = _seen(place / "elsewhere")
    configuration = ServerConfig(
        find_tool(("mariadbd",)).path,
        base,
        place / "run",
        memory=64 << 20,
        writable=(store,),
        options=options_for_copy(base, {}),
    )
    with LaunchedServer(configuration) as server, server.connection.connect() as session:
        opened = {str(link.readlink()) for link in Path(f"/proc/{server.pid}/fd").iterdir()}
        assert not any(str(place / "elsewhere") in path for path in opened)
        assert dict(session.query(f"CHECKSUM TABLE {', '.join(TABLES)}, shop.my")) == expected
        session.execute("ALTER TABLE shop.one ADD COLUMN w INT")  # crashes a server without its links
        session.execute("ALTER TABLE shop.parts ENGINE=InnoDB")
        session.execute("TRUNCATE TABLE shop.two")
        assert f"DATA DIRECTORY='{store}/1/'" in session.query("SHOW CREATE TABLE shop.one")[0][1]
        assert session.scalar("SELECT COUNT(*) FROM shop.one") == 2000
    assert _seen(place / "elsewhere") == before
    assert dict(source.query(f"CHECKSUM TABLE {', '.join(TABLES)}, shop.my")) == expected


def test_prepare_is_confined_even_when_a_link_is_there(taken: Taken, place: Path) -> None:
    base = taken.copy(place / "confined")
    give_to_worker(base)
    (step,) = the_tool().prepare(base, memory=MEMORY)
    done = run(step.command)
    the_tool().verify_prepared(base, taken.receipts, [done.stderr])
    if step.command != step.plain:
        assert str(place / "elsewhere") not in step.command.render()
        assert "--unshare-net" in step.command.argv


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = tmp_path / "base"
    write_files(
        base,
        {
            "shop/a.isl": b"/data1/shop/a.ibd\n",
            "shop/a.ibd": b"A",
            "shop/c.ibd": b"C",
            "shop/b.isl": b"/data2/shop/b.ibd",
            "shop/b.ibd": b"B",
        },
    )
    return base


def test_remap_finishes_what_an_interruption_left(folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    remap(folder, store=store)
    again = tmp_path / "again"
    for interrupted in ("shop/a.ibd", "shop/b.ibd"):
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(folder, again)
        other = Path(shutil.copytree(store, tmp_path / f"store-{interrupted[5]}"))
        number = "1" if interrupted == "shop/a.ibd" else "2"
        (other / number / interrupted).rename(again / interrupted)
        assert remap(again, store=other, final=store) == ()
        assert sorted(p.relative_to(other).as_posix() for p in other.rglob("*.ibd")) == ["1/shop/a.ibd", "2/shop/b.ibd"]
        assert_local(again, store)


def test_remap_writes_the_path_of_the_final_place(folder: Path, tmp_path: Path) -> None:
    remap(folder, store=tmp_path / "staging", final=Path("/srv/mysql-external"))
    assert (folder / "shop/a.isl").read_bytes() == b"/srv/mysql-external/1/shop/a.ibd"
    assert (tmp_path / "staging/1/shop/a.ibd").read_bytes() == b"A"
    assert (folder / "shop/c.ibd").exists()


def test_nothing_is_made_when_nothing_lay_elsewhere(tmp_path: Path) -> None:
    write_files(tmp_path / "base", {"shop/c.ibd": b"C"})
    assert remap(tmp_path / "base", store=tmp_path / "store") == ()
    assert not (tmp_path / "store").exists()
    assert_local(tmp_path / "base", tmp_path / "store")


def test_a_link_without_data_or_without_a_path_is_damage(folder: Path, tmp_path: Path) -> None:
    (folder / "shop/a.ibd").unlink()
    (folder / "shop/b.isl").write_bytes(b"relative/b.ibd")
    with pytest.raises(DamagedError) as found:
        find_external(folder)
    with pytest.raises(DamagedError) as remapped:
        remap(folder, store=tmp_path / "store")
    assert len(found.value.damages) == len(remapped.value.damages) == 2
    assert (folder / "shop/a.isl").read_bytes() == b"/data1/shop/a.ibd\n"


def test_a_store_inside_the_datadir_is_refused(folder: Path) -> None:
    for store in (folder, folder / "external"):
        with pytest.raises(RefusedError, match="inside"):
            remap(folder, store=store)
    with pytest.raises(RefusedError, match="not absolute"):
        remap(folder, store=folder.with_name("s"), final=Path("relative"))


def test_a_symbolic_link_out_of_the_folder_is_refused_before_a_start(folder: Path, tmp_path: Path) -> None:
    remap(folder, store=tmp_path / "store")
    assert_local(folder, tmp_path / "store")
    (folder / "shop/t.MYD").symlink_to("/data1/t.MYD")
    with pytest.raises(RefusedError) as caught:
        assert_local(folder, tmp_path / "store")
    assert "shop/t.MYD is a link to /data1/t.MYD" in caught.value.detail
