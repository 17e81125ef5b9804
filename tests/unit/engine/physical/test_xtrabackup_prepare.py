"""What xtrabackup is told to do with a fetched copy, and when the result is believed; a stand-in plays the tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backupd.engine.physical.mariabackup_xtrabackup import MariaBackup, XtraBackup
from backupd.engine.server.backup_files import XTRABACKUP, parse_receipts, read_receipts
from backupd.model.errors import DamagedError, ToolError, UnrestorableError
from backupd.model.job import Progress
from backupd.model.server_facts import Receipts, Tool, Version
from backupd.process.run_context import RunContext
from restore.fetch.chain import prepare
from tests.support.logs.stream import write_files
from tests.support.standin import Knobs, make
from tests.support.xtrabackup_files import DATA, FIRST, FULL, SECOND, tool_at

MEMORY = 256 << 20


@pytest.fixture
def place(short_tmp: Path) -> Path:
    return short_tmp


class Chain:
    """A full backup and two increments as folders."""

    def __init__(self, place: Path) -> None:
        self.base, self.first, self.second = place / "base", place / "inc1", place / "inc2"
        for folder, files in ((self.base, {**DATA, **FULL}), (self.first, FIRST), (self.second, SECOND)):
            folder.mkdir()
            write_files(folder, files)

    @property
    def increments(self) -> list[Path]:
        return [self.first, self.second]


@pytest.fixture
def chain(short_tmp: Path) -> Chain:
    return Chain(short_tmp)


class TestPrepare:
    def test_of_a_full_backup_is_one_step(self, chain: Chain) -> None:
        (step,) = tool_at("/usr/bin/true").prepare(chain.base, memory=MEMORY)
        assert step.plain.argv == (
            "/usr/bin/true",
            f"--defaults-file={chain.base}/backup-my.cnf",
            "--prepare",
            f"--target-dir={chain.base}",
            "--use-memory=256M",
        )
        assert step.plain.cwd == chain.base

    def test_of_a_chain_applies_the_log_only_in_all_steps_but_the_last(self, chain: Chain) -> None:
        steps = tool_at("/usr/bin/true").prepare(chain.base, chain.increments, memory=MEMORY)
        assert [step.title for step in steps] == [
            "apply the redo log",
            "apply increment 1 of 2",
            "apply increment 2 of 2",
        ]
        common = [f"--target-dir={chain.base}", "--use-memory=256M"]
        assert [list(step.plain.argv[2:]) for step in steps] == [
            ["--prepare", "--apply-log-only", *common],
            ["--prepare", "--apply-log-only", *common, f"--incremental-dir={chain.first}"],
            ["--prepare", *common, f"--incremental-dir={chain.second}"],
        ]

    def test_of_a_chain_of_the_other_tool_never_says_so(self, chain: Chain) -> None:
        for folder in (chain.base, *chain.increments):
            (folder / "ib_logfile0").touch()
        tool = MariaBackup(Tool("mariadb-backup", "/usr/bin/true", Version(10, 11), ""), XTRABACKUP)
        steps = tool.prepare(chain.base, chain.increments, memory=MEMORY)
        common = [f"--target-dir={chain.base}", "--use-memory=256M"]
        assert [list(step.plain.argv[2:]) for step in steps] == [
            ["--prepare", *common],
            ["--prepare", *common, f"--incremental-dir={chain.first}"],
            ["--prepare", *common, f"--incremental-dir={chain.second}"],
        ]

    def test_in_the_wrong_order_twice_or_with_a_gap_is_refused_before_the_tool_runs(self, chain: Chain) -> None:
        for increments in ([chain.second, chain.first], [chain.first, chain.first], [chain.second], [chain.base]):
            with pytest.raises(DamagedError, match="can be prepared"):
                tool_at("/usr/bin/true").prepare(chain.base, increments, memory=MEMORY)
        with pytest.raises(DamagedError, match="can be prepared"):
            tool_at("/usr/bin/true").prepare(chain.first, memory=MEMORY)

    @pytest.mark.parametrize(
        "name", ["xtrabackup_checkpoints", "xtrabackup_info", "backup-my.cnf", "xtrabackup_logfile"]
    )
    def test_without_a_file_that_tells_of_the_backup_is_refused(self, chain: Chain, name: str) -> None:
        (chain.first / name).unlink()
        with pytest.raises(DamagedError):
            tool_at("/usr/bin/true").prepare(chain.base, chain.increments, memory=MEMORY)

    def test_the_redo_is_measured(self, chain: Chain) -> None:
        assert tool_at("/x").redo_bytes(chain.base) == 5000
        (chain.base / "xtrabackup_logfile").unlink()
        with pytest.raises(ToolError, match="xtrabackup_logfile is missing"):
            tool_at("/x").redo_bytes(chain.base)

    def test_what_the_server_does_not_need_is_named_and_its_redo_logs_are_not(self, chain: Chain) -> None:
        write_files(
            chain.base, dict.fromkeys(["ib_logfile0", "ib_logfile1", "ibtmp1", "xtrabackup_binlog_pos_innodb"], b"")
        )
        left = {path.name for pattern in tool_at("/x").leftovers for path in chain.base.glob(pattern)}
        assert left == {*FULL, "xtrabackup_binlog_pos_innodb"}


class TestWhatPrepareMade:
    def prepared(
        self, place: Path, chain: Chain, *, increments: bool = True, **knobs: Any
    ) -> tuple[XtraBackup, Receipts]:
        """Run every step on ``chain`` with a stand-in, and what restore/prepare makes of it."""
        standin = make(place / "standin", knobs=Knobs(**knobs))
        tool = tool_at(standin.path)
        receipts = read_receipts(chain.second if increments else chain.base)
        heard: list[Progress] = []
        prepare(
            tool,
            chain.base,
            chain.increments if increments else [],
            receipts,
            RunContext(report=heard.append),
            memory=MEMORY,
            logs=place / "logs",
        )
        return tool, receipts

    def test_is_good_when_the_last_number_reaches_the_end(self, place: Path, chain: Chain) -> None:
        self.prepared(place, chain)
        found = read_receipts(chain.base)
        assert found.backup_type == "full-prepared"
        assert found.position == parse_receipts(SECOND).position

    def test_is_good_with_the_lines_of_version_8(self, place: Path, chain: Chain) -> None:
        stamp = "2026-11-21T02:04:24.123456-00:00 0"
        self.prepared(
            place,
            chain,
            last=f"{stamp} [Note] [MY-011825] [Xtrabackup] completed OK!",
            shutdown=f"{stamp} [Note] [MY-012980] [InnoDB] Shutdown completed; log sequence number {{}}",
        )

    def test_may_be_repeated(self, place: Path, chain: Chain) -> None:
        tool, receipts = self.prepared(place, chain, increments=False)
        logs = ["x\nInnoDB: Shutdown completed; log sequence number 375717928\n261121 02:04:24 completed OK!\n"]
        assert len(tool.prepare(chain.base, memory=MEMORY)) == 1
        tool.verify_prepared(chain.base, receipts, logs)

    def test_takes_no_more_increments_once_it_was_prepared_to_the_end(self, place: Path, chain: Chain) -> None:
        tool, _ = self.prepared(place, chain, increments=False)
        with pytest.raises(DamagedError, match="can be prepared") as caught:
            tool.prepare(chain.base, [chain.first], memory=MEMORY)
        assert "full-prepared, not full-backuped or log-applied" in caught.value.detail

    @pytest.mark.parametrize(
        ("knobs", "message"),
        [
            ({"reached": 270546472}, "applied the redo log up to 270546472 only; the backup goes to 375716024"),
            ({"reached": 0, "shutdown": "InnoDB: Shutdown completed"}, "did not report how far"),
            ({"last": "261121 02:04:24 completed"}, "but did not print"),
            ({"prepare_says": ["xtrabackup: This target seems not to have correct metadata..."]}, "not completely"),
            (
                {
                    "prepare_says": [
                        "InnoDB: Database page corruption on disk or a failed file read of page [page id: 8, 4]."
                    ]
                },
                "not completely",
            ),
            (
                {"prepare_says": ["xtrabackup: # The log was not applied to the intended LSN!         #"]},
                "not completely",
            ),
            ({"prepare_says": ["InnoDB: Could not find a valid tablespace file for `shop/orders`."]}, "not completely"),
            ({"prepare_says": ["InnoDB: Tablespace 8 was not found at ./shop/orders.ibd."]}, "not completely"),
            ({"exit_code": 2}, "exited with 2"),
        ],
    )
    def test_is_not_believed_when(self, place: Path, chain: Chain, knobs: dict[str, Any], message: str) -> None:
        with pytest.raises((ToolError, UnrestorableError), match=message):
            self.prepared(place, chain, **knobs)

    def test_may_lack_a_table_that_broken_ddl_left_behind(self, place: Path, chain: Chain) -> None:
        said = "InnoDB: Could not find a valid tablespace file for `shop/#sql-ib9`."
        self.prepared(place, chain, prepare_says=[said])

    def test_is_not_believed_when_nothing_was_run_or_not_the_last_step(self, place: Path, chain: Chain) -> None:
        tool = tool_at(make(place / "standin").path)
        with pytest.raises(ToolError, match="backup_type is full-backuped, not full-prepared"):
            tool.verify_prepared(chain.base, parse_receipts(FULL), [])
        write_files(
            chain.base,
            {"xtrabackup_checkpoints": FULL["xtrabackup_checkpoints"].replace(b"full-backuped", b"log-applied")},
        )
        with pytest.raises(ToolError, match="backup_type is log-applied, not full-prepared"):
            tool.verify_prepared(chain.base, parse_receipts(FULL), [])

    def test_is_not_believed_when_an_increment_is_missing_in_it(self, place: Path, chain: Chain) -> None:
        tool, _ = self.prepared(place, chain, increments=False)
        logs = ["InnoDB: Shutdown completed; log sequence number 999999999\n261121 02:04:24 completed OK!\n"]
        with pytest.raises(ToolError, match="prepared up to the backup that ends at 331411436, not 333744294"):
            tool.verify_prepared(chain.base, parse_receipts(SECOND), logs)
