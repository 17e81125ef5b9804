from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.model.errors import DamagedError, RefusedError
from backupd.model.table import TableName
from backupd.model.text import new_id
from backupd.process.run_context import RunContext
from backupd.transfer.leases import pins
from backupd.transfer.records.encryption import Unsealer
from restore.datadir.checks import examine, verdict
from restore.fetch.sources import Sources
from restore.scratch_server import Scratch, ScratchSpec, remove_dead, scratch_instance, workshop
from storage import layout
from storage.destination import Destination
from tests.support.keys import Keys
from tests.support.restores.builder import files_below
from tests.support.restores.taken import Taken, now

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a scratch copy is given to the server's user")
MIB = 1024 * 1024


def spec_for(taken: Taken, path: Path) -> ScratchSpec:
    return ScratchSpec(
        scratch_id=new_id(now()),
        server="shop",
        chain=(taken.header.backup_id,),
        path=path,
    )


CONTEXT = RunContext(memory=256 * MIB)


def source(keys: Keys, *destinations: Destination) -> Sources:
    return Sources(destinations, Unsealer(keys.secret_home))


def test_a_scratch_instance_is_the_source_in_a_sandbox_and_vanishes_without_a_trace(
    taken: Taken, keys: Keys, short_tmp: Path
) -> None:
    before = files_below(taken.folder)
    with scratch_instance(spec_for(taken, short_tmp), source(keys, taken.destination), CONTEXT) as copy:
        assert isinstance(copy, Scratch)
        assert copy.sandboxed
        with copy.connection.connect() as session:
            assert session.query("SELECT @@skip_networking, @@event_scheduler, @@log_bin") == [(1, "OFF", 0)]
            datadir = Path(str(session.scalar("SELECT @@datadir")))
        assert short_tmp in datadir.parents
        checks, compared = examine(
            copy.connection,
            RunContext(workers=2),
            statements=["SELECT COUNT(*) = 5000 FROM shop.orders"],
            target=now(),
            witness=taken.witness,
            position=taken.body.facts.position,
        )
        pid = int((datadir.parent / "run/pid").read_text())
        assert pid
    assert verdict(checks, compared) == ("proved", "")
    assert [phase.name for phase in copy.phases] == ["fetched", "prepared", "restored", "started"]
    assert compared.equal == len(taken.witness.checksums)
    assert list(short_tmp.iterdir()) == []
    assert files_below(taken.folder) == before
    assert pins(taken.destination) == []


def test_an_error_inside_the_block_leaves_nothing_either(taken: Taken, keys: Keys, short_tmp: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        scratch_instance(spec_for(taken, short_tmp), source(keys, taken.destination), CONTEXT) as copy,
    ):
        socket = Path(copy.connection.socket)
        assert socket.is_socket()
        raise ZeroDivisionError
    assert list(short_tmp.iterdir()) == []


def test_a_flipped_byte_makes_it_fail_by_name_and_leaves_nothing(taken: Taken, keys: Keys, short_tmp: Path) -> None:
    bad = taken.copy(short_tmp / "repository")
    name = taken.header.objects[3].name
    path = bad.folder / layout.object_key(name)
    content = bytearray(path.read_bytes())
    content[40] ^= 8
    path.unlink()
    path.write_bytes(content)
    with (
        pytest.raises(DamagedError) as damaged,
        scratch_instance(spec_for(taken, short_tmp / "scratch"), source(keys, bad.destination), CONTEXT),
    ):
        pass
    assert name in str(damaged.value)
    assert list((short_tmp / "scratch").iterdir()) == []


def test_a_table_whose_files_are_there_but_which_the_server_does_not_know_is_missed_before_anything_is_replayed(
    taken: Taken, keys: Keys, short_tmp: Path
) -> None:
    work = workshop(spec_for(taken, short_tmp), source(keys, taken.destination), CONTEXT)
    with work.place() as folder:
        work.fetch(work.chain, folder)
        built = work.assemble(work.chain, folder)
        facts = taken.body.facts
        fewer = tuple(table for table in facts.inventory or () if table.name != TableName("shop", "orders"))
        assert len(fewer) == len(facts.inventory or ()) - 1
        last = replace(work.chain[-1], body=replace(taken.body, facts=replace(facts, inventory=fewer)))
        with work.started([last], folder, built) as copy:
            assert any(
                "1 tables of the restored copy are not in the list of" in line and line.endswith(": shop.orders")
                for line in copy.warnings
            ), copy.warnings
        other = tuple(
            replace(table, engine="MyISAM") if table.name == TableName("shop", "orders") else table
            for table in facts.inventory or ()
        )
        last = replace(work.chain[-1], body=replace(taken.body, facts=replace(facts, inventory=other)))
        with (
            pytest.raises(DamagedError, match="are of another engine in the restored copy") as damaged,
            work.started([last], folder, built),
        ):
            pass
        assert damaged.value.damages == ("shop.orders",)
        (folder / "data/shop/orders.frm").unlink()
        with (
            pytest.raises(DamagedError, match="are unknown to a server on the restored copy") as damaged,
            work.started(work.chain, folder, built),
        ):
            pass
        assert damaged.value.damages == ("shop.orders",)


def test_a_copy_that_would_be_too_large_is_refused_before_it_begins(taken: Taken, keys: Keys, short_tmp: Path) -> None:
    spec = replace(spec_for(taken, short_tmp), max_bytes=50 * MIB)
    with (
        pytest.raises(RefusedError, match=r"50\.0 MiB"),
        scratch_instance(spec, source(keys, taken.destination), CONTEXT),
    ):
        pass
    assert list(short_tmp.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_one_and_no_server_outlives_it(
    taken: Taken, keys: Keys, short_tmp: Path
) -> None:
    script = f"""
import os, signal
from pathlib import Path
from backupd.process.run_context import RunContext
from backupd.transfer.records.encryption import Unsealer
from restore.fetch.sources import Sources
from restore.scratch_server import ScratchSpec, scratch_instance
from storage.filesystem import FilesystemDestination
spec = ScratchSpec("20261121T040000Z-0000dead", "shop", ({taken.header.backup_id!r},), Path({str(short_tmp)!r}))
sources = Sources([FilesystemDestination("local", Path({str(taken.folder)!r}))],
                  Unsealer(Path({str(keys.secret_home)!r})))
with scratch_instance(spec, sources, RunContext(memory={256 * MIB})) as copy:
    print(copy.connection.socket, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[3], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        socket = Path(child.stdout.readline().decode().strip())
        # The pipe is closed when the last of its holders is gone.
        child.stdout.read()
    assert child.returncode == -signal.SIGKILL
    assert socket.parent.is_dir()
    (short_tmp / "scratch-not-ours").write_text("a file")
    while any(str(short_tmp) in read_command(process) for process in Path("/proc").glob("[0-9]*")):
        pass
    assert remove_dead(short_tmp) == ("scratch-20261121T040000Z-0000dead",)
    assert [path.name for path in short_tmp.iterdir()] == ["scratch-not-ours"]


def read_command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def test_a_living_scratch_copy_is_left_alone_by_the_next_one(taken: Taken, keys: Keys, short_tmp: Path) -> None:
    with scratch_instance(spec_for(taken, short_tmp), source(keys, taken.destination), CONTEXT) as copy:
        assert remove_dead(short_tmp) == ()
        with copy.connection.connect() as session:
            assert session.scalar("SELECT 1") == 1
