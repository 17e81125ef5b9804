"""Fixtures for every room. What is dear (a server with data, keys) is shared by a session: only read it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import sample
from tests.support.keys import Keys, operator_keys
from tests.support.mariadb import PrivateServer
from tests.support.places import short_directory

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a background job of a shell. Programs inherit that, and could then not be interrupted by tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
