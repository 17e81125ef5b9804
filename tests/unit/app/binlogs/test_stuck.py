"""A stream in a process that others share, which does not end when it is asked to."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from backupd.app.binlogs import shared_streams, stream_process
from backupd.app.binlogs.shared_streams import SharedStream
from backupd.app.binlogs.stream_process import StreamRun
from backupd.app.context.settings import spool_folder
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.child_process import CatalogWriter
from backupd.app.runtime.service_manager import Waker
from backupd.binlog.spool_files import Spool
from backupd.catalog.session import open_catalog
from tests.support.service.house import GOLD, Office
from tests.support.service.processes import until


@pytest.mark.parametrize(("shared", "whole"), [(True, False), (True, True), (False, False)])
def test_its_lock_is_held_and_its_process_is_asked_to_end_while_it_may_write_to_the_spool(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, *, shared: bool, whole: bool
) -> None:
    """``whole``: all of the process ends already."""
    monkeypatch.setattr(stream_process, "UNWIND", 0.05)
    monkeypatch.setattr(stream_process, "DEADLINE", 0.05)
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    settings = Office(
        short_tmp, servers={"db1": "gold"}, policies={"gold": GOLD + "binlog: {checkpoint: 5s}\n"}
    ).write()
    answered, stop = threading.Event(), threading.Event()
    hanging = threading.Thread(target=answered.wait, daemon=True)
    hanging.start()
    if whole:
        stop.set()
    with open_catalog(settings.catalog) as catalog:
        writer = CatalogWriter(settings.catalog)
        run = StreamRun(Wiring(settings, catalog), "db1", writer, Waker(), stop, kept=True, shared=shared)
        ending = threading.Thread(target=run._end, args=(hanging,), daemon=True)
        ending.start()
        if shared and not whole:
            until(lambda: bool(signals))
        ending.join(0.5 if shared else 300)
        assert ending.is_alive() is shared
        assert signals == ([(os.getpid(), signal.SIGTERM)] if shared and not whole else [])
        answered.set()
        ending.join(300)
        assert not ending.is_alive()


class _Fails(StreamRun):
    """A stream that has begun a thread, and fails then."""

    begun: threading.Thread

    def run(self, *, once: bool) -> None:
        type(self).begun = threading.Thread(target=self._stop.wait, daemon=True)
        self.begun.start()
        raise RuntimeError("can't start new thread")


def test_one_that_fails_leaves_no_thread_in_the_process_that_others_share(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_streams, "StreamRun", _Fails)
    settings = Office(
        short_tmp, servers={"db1": "gold"}, policies={"gold": GOLD + "binlog: {checkpoint: 5s}\n"}
    ).write()
    spool_folder(settings, "db1").mkdir(parents=True)
    with open_catalog(settings.catalog):
        SharedStream(settings, "db1", Waker()).run()
    _Fails.begun.join(300)
    assert not _Fails.begun.is_alive()
    assert "can't start new thread" in (Spool(spool_folder(settings, "db1")).why_over(os.getpid()) or "")
