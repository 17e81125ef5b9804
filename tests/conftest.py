"""Fixtures for every room. What is dear (a server with data, keys) is shared by a session: only read it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import sample
from tests.support.keys import Keys, operator_keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import short_directory
from tests.support.stores.stores import moto_server, s3_server

__all__ = ["moto_server", "s3_server"]

pytest_plugins = ("tests.support.verdicts", "pytester")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a background job of a shell. Programs inherit that, and could then not be interrupted by tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)


_LONGEST = (
    "e2e/service/test_whole_day.py",
    "e2e/streams/test_stream_campaign.py",
    "e2e/streams/test_promise.py",
    "e2e/service/test_stacks.py",
    "e2e/streams/test_branches_mysql.py",
    "e2e/restores/test_every_second.py",
    "e2e/stores/test_kill_campaign.py",
    "e2e/restores/test_point_in_time.py",
    "e2e/streams/test_branches.py",
    "e2e/backups/test_names.py",
    "e2e/restores/test_point_in_time_mysql.py",
    "e2e/backups/test_chains.py",
    "e2e/stores/test_trust.py",
    "e2e/streams/test_streaming.py",
    "e2e/streams/test_idle_and_gaps.py",
    "e2e/streams/test_binlog_check.py",
    "e2e/stores/test_retention.py",
    "unit/binlog/test_killed.py",
    "unit/engine/physical/test_traps.py",
    "unit/engine/test_witness.py",
    "unit/app/retention/test_gold.py",
    "e2e/stores/test_disaster.py",
    "e2e/streams/test_archive.py",
    "e2e/service/test_others.py",
    "unit/app/retention/test_store_faults.py",
    "unit/storage/s3/test_destination.py",
    "unit/storage/sftp/test_destination.py",
)
"""Files that take a minute or more, few tests in each: begun first, they do not keep the others waiting at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        name = item.path.relative_to(Path(__file__).parent).as_posix()
        return _LONGEST.index(name) if name in _LONGEST else len(_LONGEST) + ("e2e" not in item.path.parts)

    items.sort(key=rank)
    if "BACKUPD_ROUNDS" not in os.environ:
        for item in items:
            if item.get_closest_marker("soak") is not None:
                item.add_marker(pytest.mark.skip(reason="left to a soak"))


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A short temporary folder that the database's user can enter."""
    with short_directory() as path:
        yield path


@pytest.fixture(scope="session")
def keys() -> Iterator[Keys]:
    """A key pair for ops@example.com in one home, its public half alone in another."""
    with operator_keys() as pair:
        yield pair


@pytest.fixture
def server() -> Iterator[PrivateServer]:
    """A fresh, empty server with the users ``backup`` and ``backupd``."""
    with PrivateServer() as private:
        private.create_backup_users()
        yield private


@pytest.fixture(scope="session")
def shared_server() -> Iterator[PrivateServer]:
    """A server with the small sample and both backup users, shared by the session: do not change its data."""
    with PrivateServer() as private:
        private.create_backup_users()
        sample.create(private)
        yield private
