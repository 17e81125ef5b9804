"""By when what a server has written is known: the earlier of two clocks, read before the place. The server is a fake,
since no real one has a clock that is ahead."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from backupd.binlog.session import Session, Watch
from backupd.binlog.spool_files import Spool
from backupd.binlog.supervisor import Streamer
from backupd.engine.server.binary_logs import BinlogSource
from backupd.model.server_facts import Position

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize("ahead", [timedelta(minutes=30), timedelta(minutes=-30)])
def test_neither_a_clock_of_the_server_that_is_ahead_nor_ours_claims_anything(tmp_path: Path, ahead: timedelta) -> None:
    moments = [NOW, NOW + timedelta(seconds=7)]
    streamer = Streamer(
        "db1",
        cast(BinlogSource, SimpleNamespace()),
        Spool(tmp_path / "spool"),
        installation="i",
        wanted=None,
        max_spool_bytes=1,
        clock=lambda: moments[0],
        on_event=lambda _event: None,
    )

    def look(*, files: bool) -> SimpleNamespace:
        del files
        moments.pop(0)  # asking takes a while, and the place is that of its beginning
        return SimpleNamespace(server_time=NOW + ahead, position=Position("binlog.000001", 900), logs=())

    streamer._approach = SimpleNamespace(look=look)  # type: ignore[assignment]  # the fake server
    watch = SimpleNamespace(contradiction=lambda *_all: "", is_stalled=lambda: False, is_note_due=lambda: False)
    session = SimpleNamespace(received=(1, 900), start=SimpleNamespace(branch=SimpleNamespace(id="b")))
    question = streamer._ask(cast(Session, session))
    question.state.exception(timeout=60)
    assert streamer._heed(question, cast(Session, session), cast(Watch, watch)) == ""
    assert streamer._status.server_time == min(NOW, NOW + ahead)
