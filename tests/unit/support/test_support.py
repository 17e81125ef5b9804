from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import sample
from tests.support.keys import Keys, gpg
from tests.support.load import Writers, bank_total
from tests.support.servers.datadir import ServerDiedError
from tests.support.servers.mariadb import (
    BACKUP_PASSWORD,
    BACKUP_USER,
    PrivateServer,
    query,
)
from tests.support.servers.replica import catch_up, replica_of


def test_a_server_starts_restarts_and_leaves_no_process_behind() -> None:
    with PrivateServer() as server:
        server.execute("CREATE DATABASE x", "CREATE TABLE x.t (a INT PRIMARY KEY)", "INSERT INTO x.t VALUES (1)")
        server.restart(innodb_buffer_pool_size="64M")
        assert server.scalar("SELECT COUNT(*) FROM x.t") == 1
        assert server.scalar("SELECT @@log_bin, @@binlog_format") == 1
        server.kill()
        server.start()
        assert server.scalar("SELECT COUNT(*) FROM x.t") == 1
        pid, base = server.pid, server.base
    assert not Path(f"/proc/{pid}").exists()
    assert not base.exists()


def test_a_server_that_cannot_start_shows_its_log() -> None:
    with pytest.raises(ServerDiedError, match="no_such_option"), PrivateServer(options={"no_such_option": 1}):
        pass


def test_options_that_shape_files_make_a_datadir_of_their_own() -> None:
    with PrivateServer(options={"innodb_page_size": "8k", "innodb_undo_tablespaces": 3}) as server:
        assert server.scalar("SELECT @@innodb_page_size") == 8192


def test_the_backup_user_has_the_tools_privileges_and_no_more(server: PrivateServer) -> None:
    with server.connect(user=BACKUP_USER, password=BACKUP_PASSWORD) as connection:
        (grants,) = query(connection, "SHOW GRANTS")[0]
    assert grants.startswith("GRANT RELOAD, PROCESS, LOCK TABLES, BINLOG MONITOR ON *.*")


def test_the_same_seed_makes_the_same_rows(shared_server: PrivateServer) -> None:
    with PrivateServer() as other, shared_server.connect() as first:
        sample.create(other)
        with other.connect() as second:
            assert sample.checksum_everything(second) == sample.checksum_everything(first)
            described = sample.describe_everything(second)
    assert all(described[kind] for kind in ("views", "triggers", "routines", "events", "grants"))


def test_writers_move_money_but_never_make_any() -> None:
    with PrivateServer(tcp=True) as server:
        sample.create(server)
        with replica_of(server) as replica, server.connect() as connection:
            total = bank_total(connection)
            with Writers(server, 4) as writers:
                while writers.transactions < 200:
                    pass
            assert bank_total(connection) == total
            catch_up(server, replica)
            with replica.connect() as copy:
                assert sample.checksum_everything(copy) == sample.checksum_everything(connection)


def test_hostile_names_are_real_tables(server: PrivateServer) -> None:
    pairs = sample.create_hostile_names(server)
    with server.connect() as connection:
        assert len(sample.checksum_everything(connection)) == len(pairs)


def test_only_the_secret_home_opens(keys: Keys) -> None:
    sealed = gpg(keys.public_home, "--trust-model", "always", "--encrypt", "-r", keys.fingerprint, stdin=b"hello")
    assert gpg(keys.secret_home, "--decrypt", stdin=sealed) == b"hello"
    assert not (keys.public_home / "private-keys-v1.d").exists() or not any(
        (keys.public_home / "private-keys-v1.d").iterdir()
    )
