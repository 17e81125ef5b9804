"""What the physical tools say is well and is not. Every real tool on this machine goes through the same tests: each
provokes a trap, and the test is passed when this project raises, whatever the tool itself says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from backupd.engine.physical.capture import CaptureRequest, Data, FileEvent, file_sizes, verify_files
from backupd.engine.physical.mariabackup_xtrabackup import XtraBackup
from backupd.engine.server.backup_files import read_receipts
from backupd.model.errors import BackupdError, CancelledError, DamagedError, StreamError, ToolError
from backupd.process.pipeline import run
from tests.support.logs.stream import Extraction
from tests.support.servers.backups import MEMORY, Taken, children, connection_to, give_to_worker, prepare, signal_all
from tests.support.servers.under_test import TOOLS, ToolUnderTest, under_test
from tests.support.stores.folders import short_directory


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture(scope="module", params=TOOLS)
def under(request: pytest.FixtureRequest) -> Iterator[ToolUnderTest]:
    with under_test(request.param) as made:
        yield made


@dataclass(frozen=True)
class Chain:
    """A full backup and two increments, and what the tables held then."""

    full: Taken
    first: Taken
    second: Taken
    rows: dict[str, int]

    def copy(self, place: Path) -> tuple[Path, Path, Path]:
        return (self.full.copy(place / "copy"), self.first.copy(place / "copy-1"), self.second.copy(place / "copy-2"))


@pytest.fixture(scope="module")
def chain(under: ToolUnderTest, place: Path) -> Iterator[Chain]:
    """Shared: copy before changing. A restart between is a checkpoint, so that each begins at a number of its own."""
    here = place / under.name
    here.mkdir()
    full = under.take(here / "full", on_event=under.busy())
    under.server.restart()
    first = under.take(here / "first", lsn=full.receipts.to_lsn, on_event=under.busy())
    under.write()
    under.server.restart()
    second = under.take(here / "second", lsn=first.receipts.to_lsn, on_event=under.busy())
    yield Chain(full, first, second, under.checksums())
    shutil.rmtree(here)


@pytest.fixture
def here(place: Path) -> Iterator[Path]:
    path = place / "here"
    path.mkdir()
    yield path
    shutil.rmtree(path)


class TestAGoodBackup:
    def test_alone_has_its_files_and_passes_every_check(self, under: ToolUnderTest, chain: Chain, here: Path) -> None:
        base = chain.full.copy(here / "copy")
        verify_files(base, chain.full.sizes)
        logs = prepare(base, tool=under.tool)
        under.tool.verify_prepared(base, chain.full.receipts, logs)
        under.tool.verify_prepared(base, chain.full.receipts, prepare(base, tool=under.tool))

    def test_with_increments_in_order_has_the_rows_of_the_last(
        self, under: ToolUnderTest, chain: Chain, here: Path
    ) -> None:
        base, first, second = chain.copy(here)
        logs = prepare(base, first, second, tool=under.tool)
        under.tool.verify_prepared(base, chain.second.receipts, logs)
        assert read_receipts(base).position == chain.second.receipts.position
        assert under.rows_of(base) == chain.rows

    def test_streams_the_files_that_its_own_program_unpacks(self, under: ToolUnderTest, here: Path) -> None:
        raw, own = here / "raw.xbs", here / "own"
        own.mkdir()
        raw.touch()
        raw.chmod(0o666)  # for everybody, but not in a sandbox: the wrapper is for none
        taken = under.take(here / "ours", tool=under.wrapped(here, f'"$TOOL" "$@" | tee {raw}'))
        with raw.open("rb") as stream:
            subprocess.run([under.unpack, "-x", "-C", str(own)], stdin=stream, check=True)
        assert file_sizes(own) == taken.sizes
        for name in taken.sizes:
            assert (own / name).read_bytes() == (taken.base / name).read_bytes(), name


class TestABackupThatIsNotWhole:
    def test_because_the_tool_was_killed(self, under: ToolUnderTest, chain: Chain, here: Path) -> None:
        work = here / "work"
        work.mkdir()
        half = sum(chain.full.sizes.values()) // 2
        extraction, done = Extraction(here / "partial"), 0
        with under.tool.capture(CaptureRequest(connection_to(under.server), work)) as capture:
            with pytest.raises(ToolError, match="SIGKILL"):
                for event in capture.events():
                    extraction.take(event)
                    before, done = done, done + (len(event.payload) if isinstance(event, Data) else 0)
                    if before <= half < done:
                        signal_all(str(work), signal.SIGKILL)
            with pytest.raises(ValueError, match="not ended"):
                capture.receipts()
        with pytest.raises(DamagedError, match="can be prepared"):
            under.tool.prepare(here / "partial", memory=MEMORY)

    @pytest.mark.parametrize("name", ["xtrabackup_checkpoints", "xtrabackup_info"])
    def test_because_the_stream_was_cut_between_two_files(self, under: ToolUnderTest, here: Path, name: str) -> None:
        cut = (
            f"import re, sys; d = sys.stdin.buffer.read();"
            f" found = re.search(rb'XBSTCK01.P....(\\./)?{name}', d, re.S);"
            f" sys.stdout.buffer.write(d[:found.start()] if found else d)"
        )  # its --help is whole
        with pytest.raises(StreamError):
            under.take(here / "cut", tool=under.wrapped(here, f'"$TOOL" "$@" | python3 -c "{cut}"'))

    @pytest.mark.parametrize("name", ["xtrabackup_checkpoints", "xtrabackup_info", "backup-my.cnf", ""])
    def test_because_a_receipt_or_the_redo_is_missing(
        self, under: ToolUnderTest, chain: Chain, here: Path, name: str
    ) -> None:
        base = chain.full.copy(here / "copy")
        (base / (name or under.redo)).unlink()
        with pytest.raises(DamagedError):
            under.tool.prepare(base, memory=MEMORY)

    @pytest.mark.parametrize("keep", [None, 0.5])
    def test_because_a_table_is_missing_or_cut(
        self, under: ToolUnderTest, chain: Chain, here: Path, keep: float | None
    ) -> None:
        base = chain.full.copy(here / "copy")
        table = base / "shop/orders.ibd"
        if keep is None:
            table.unlink()
        else:
            os.truncate(table, round(table.stat().st_size * keep) // 16384 * 16384)
        with pytest.raises(DamagedError, match="1 files") as caught:
            verify_files(base, chain.full.sizes)
        assert "shop/orders.ibd" in caught.value.detail
        print("without that check:", _outcome(under, base, chain.full))

    @pytest.mark.parametrize("damage", ["cut", "garbage"])
    def test_because_its_redo_is_damaged(self, under: ToolUnderTest, here: Path, damage: str) -> None:
        taken = under.take(here / "lively", on_event=under.busy())
        redo = taken.base / under.redo
        size = redo.stat().st_size
        assert size > 200_000
        with redo.open("r+b") as file:
            if damage == "cut":
                file.truncate(size // 2)
            else:
                file.seek(size // 2)
                file.write(os.urandom(4096))
        outcome = _outcome(under, taken.base, taken)
        print(outcome)
        assert outcome != "prepared"

    def test_because_it_was_never_prepared_or_with_the_log_only(
        self, under: ToolUnderTest, chain: Chain, here: Path
    ) -> None:
        base, first, _ = chain.copy(here)
        with pytest.raises(ToolError, match="not prepared"):
            under.tool.verify_prepared(base, chain.full.receipts, [])
        give_to_worker(base, first)
        step = under.tool.prepare(base, [first], memory=MEMORY)[0]
        log = run(step.command).stderr
        if isinstance(under.tool, XtraBackup):  # mariadb-backup calls both states by one name
            with pytest.raises(ToolError, match="not prepared"):
                under.tool.verify_prepared(base, chain.full.receipts, [log])


class TestADamagedServer:
    def test_gives_no_backup_and_none_of_its_rows_to_error_or_log(self, under: ToolUnderTest, here: Path) -> None:
        """Both tools give up; mariadb-backup prints the page, as numbers and as letters."""
        work, log = here / "work", here / "log"
        work.mkdir()
        table = under.server.datadir / "shop/orders.ibd"
        place = table.stat().st_size // 16384 // 2 * 16384 + 8000
        with table.open("r+b") as file:
            file.seek(place)
            page = file.read(16)
            file.seek(place)
            file.write(b"damaged by test!")
        said: list[str] = []
        try:
            request = CaptureRequest(connection_to(under.server), work, log=log, on_stderr=said.append)
            with under.tool.capture(request) as capture, pytest.raises(ToolError) as caught:
                for _event in capture.events():
                    pass
        finally:
            with table.open("r+b") as file:
                file.seek(place)
                file.write(page)
        assert "CHECK TABLE" in caught.value.hint
        row = re.compile(r"([A-Z])\1{40}|(?:4[1-9a-f]|5[0-9a]){40}")
        assert not row.search(str(caught.value))
        assert not row.search(log.read_text())
        if under.name == "mariadb-backup":
            assert row.search("".join(said))


class TestIncrements:
    def test_that_do_not_follow_each_other_are_refused_before_the_tool_runs(
        self, under: ToolUnderTest, chain: Chain
    ) -> None:
        full, first, second = chain.full, chain.first, chain.second
        assert full.receipts.to_lsn < first.receipts.to_lsn < second.receipts.to_lsn
        for increments in ((second, first), (first, first), (second,), (first, second, second), (full,)):
            with pytest.raises(DamagedError, match="can be prepared"):
                under.tool.prepare(full.base, [taken.base for taken in increments], memory=MEMORY)
        with pytest.raises(DamagedError, match="can be prepared"):
            under.tool.prepare(first.base, memory=MEMORY)

    def test_do_not_go_onto_a_backup_that_was_prepared_to_the_end(
        self, under: ToolUnderTest, chain: Chain, here: Path
    ) -> None:
        base = chain.full.copy(here / "copy")
        under.tool.verify_prepared(base, chain.full.receipts, prepare(base, tool=under.tool))
        if isinstance(under.tool, XtraBackup):  # mariadb-backup knows no such end
            with pytest.raises(DamagedError, match="can be prepared"):
                under.tool.prepare(base, [chain.first.base], memory=MEMORY)

    def test_since_a_number_of_another_server_are_noticed(self, under: ToolUnderTest, here: Path) -> None:
        with pytest.raises((StreamError, ToolError)):
            under.take(here / "future", lsn=99999999999)


class TestStopping:
    def test_by_sigterm_leaves_a_good_backup_or_an_error(self, under: ToolUnderTest, here: Path) -> None:
        """xtrabackup dies of it, mariadb-backup blocks it."""
        sent: list[int] = []

        def send(_event: FileEvent) -> None:
            if not sent:
                sent.extend(signal_all(str(here / "term.work"), signal.SIGTERM))

        try:
            taken = under.take(here / "term", on_event=send)
        except ToolError as error:
            message = error.message
        else:
            verify_files(taken.base, taken.sizes)
            under.tool.verify_prepared(taken.base, taken.receipts, prepare(taken.base, tool=under.tool))
            message = "good, in spite of SIGTERM"
        assert sent
        assert "SIGTERM" in message
        assert not children(str(here / "term.work"))

    def test_on_request_leaves_no_process(self, under: ToolUnderTest, here: Path) -> None:
        work = here / "work"
        work.mkdir()
        cancel = threading.Event()
        request = CaptureRequest(connection_to(under.server), work, cancel=cancel)
        with pytest.raises(CancelledError), under.tool.capture(request) as capture:
            for _event in capture.events():
                cancel.set()
        assert not children(str(work))


def _outcome(under: ToolUnderTest, base: Path, taken: Taken) -> str:
    """What comes of preparing ``base``: ``prepared``, or why not."""
    try:
        under.tool.verify_prepared(base, taken.receipts, prepare(base, tool=under.tool))
    except BackupdError as error:
        return error.message
    return "prepared"
