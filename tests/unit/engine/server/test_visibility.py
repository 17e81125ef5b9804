"""What an account would not even see, what it may not read though it sees it, and what sessions that bypass the binary
log leave of it."""

from __future__ import annotations

import pytest

from backupd.engine.server.accounts import Grants, hidden, parse_grants, read_grants, unreadable, unseen
from backupd.engine.server.probe import read_dialect, unlogged
from backupd.engine.server.service_account import STAGING, account_for_restores, grant_for_restores, lacks_for_restores
from backupd.engine.sql.client import Connection
from backupd.engine.witness import take
from backupd.model.server_facts import Flavour
from backupd.model.table import TableName, TablePattern
from tests.support.servers import mysql
from tests.support.servers.flavours import server_of
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER, Server, connect, query


def told(grants: Grants, *patterns: str) -> list[str]:
    return [
        text.partition(" asks ")[0].rpartition(" ")[2]
        for text in unseen(grants, [TablePattern.parse(pattern) for pattern in patterns])
    ]


def test_patterns_that_reach_beyond_what_the_account_may_read_are_told() -> None:
    grants = parse_grants(
        "b@%",
        [
            "GRANT RELOAD ON *.* TO `b`@`%`",
            r"GRANT SELECT, TRIGGER ON `shop\_a`.* TO `b`@`%`",
            r"GRANT ALL PRIVILEGES ON `crm\_%`.* TO `b`@`%`",
            "GRANT SELECT (`id`, `v`), INSERT ON `hr`.`people` TO `b`@`%`",
            "GRANT SELECT ON `hr`.`rooms` TO `b`@`%`",
        ],
    )
    assert told(grants, "shop_a.*", "shop_a.o*", "crm_1.*", "crm_*.*", "hr.rooms") == []
    beyond = ["*.*", "shop_?.*", "shop.*", "crm*.*", "hr.*"]
    assert told(grants, *beyond) == beyond
    assert grants.allow("SELECT", "hr", "rooms")
    assert not grants.allow("SELECT", "hr", "people")
    assert not grants.allow("SELECT", "shopXa")
    assert told(parse_grants("b@%", ["GRANT SELECT ON *.* TO `b`@`%`"]), "*.*") == []


def test_objects_are_hidden_unless_something_shows_them() -> None:
    def kinds(*grants: str) -> set[str]:
        return set(hidden(parse_grants("b@%", [f"GRANT {grant} TO `b`@`%`" for grant in grants]), "shop"))

    assert kinds("SELECT, SHOW VIEW, TRIGGER, EVENT ON `shop`.*") == {"routines"}
    assert kinds("TRIGGER, EXECUTE ON `shop`.*", "EVENT ON *.*") == {"views"}
    assert kinds("SHOW VIEW, TRIGGER, EVENT ON *.*", "SELECT ON `mysql`.`proc`") == set()
    assert kinds("SHOW VIEW, TRIGGER, EVENT ON *.*", "SHOW_ROUTINE ON *.*") == set()
    assert kinds("ALL PRIVILEGES ON `other`.*") == {"views", "triggers", "events", "routines"}


def test_under_a_partial_revoke_the_privilege_is_the_reason() -> None:
    with server_of(Flavour.MYSQL) as server:
        server.execute(
            "SET GLOBAL partial_revokes = ON",
            "CREATE DATABASE shop",
            "CREATE DATABASE secret",
            "CREATE TABLE shop.a (id INT)",
            "CREATE TABLE secret.b (id INT)",
            "CREATE USER half@localhost IDENTIFIED BY 'h'",
            "GRANT SELECT, LOCK TABLES ON *.* TO half@localhost",
            "REVOKE SELECT ON secret.* FROM half@localhost",
        )
        with Connection(socket=str(server.socket), user="half", password="h").connect() as session:
            grants = read_grants(session)
            assert grants.revoked == {"secret": {"SELECT"}}
            assert list(unseen(grants, [TablePattern("shop.*")])) == []
            (words,) = unseen(grants, [TablePattern("s*.*")])
            assert words.startswith("half@localhost has no SELECT privilege on schema secret (it is revoked there)")
            names = [TableName("shop", "a"), TableName("secret", "b")]
            assert unreadable(session, grants, names) == {names[1]: "half@localhost has no SELECT privilege on it"}


def traces_of(server: Server) -> list[str]:
    connection = Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
    with connection.connect() as session:
        return list(unlogged(session, read_dialect(session)))


@pytest.mark.skipif(bool(mysql.why_not()), reason=mysql.why_not() or "there is one")
def test_mysql_shows_which_accounts_write_past_the_log() -> None:
    with MySQLServer() as server:
        server.create_backup_users()
        assert traces_of(server) == []
        with connect(server.socket) as session:
            query(session, "SET SESSION sql_log_bin = 0")
            sessions, statements = traces_of(server)
        assert sessions.startswith("sessions of root have turned the binary log off")
        assert "sql_log_bin was set by 1 statements" in statements
        (left,) = traces_of(server)  # the session is gone, its statement is remembered
        assert "was set by 1 statements" in left


def test_mariadb_shows_statements_where_its_performance_schema_is_on_and_ours_do_not_count(
    server: PrivateServer,
) -> None:
    assert traces_of(server) == []  # off, as it is by default: nothing to see
    server.restart(performance_schema="ON")
    take(
        Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD), server="x", max_seconds=10
    )
    assert traces_of(server) == []
    with connect(server.socket) as session:
        query(session, "SET SQL_LOG_BIN=0")
    (text,) = traces_of(server)
    assert "sql_log_bin was set by 1 statements (SET `SQL_LOG_BIN`" in text


def test_an_account_may_restore_tables_where_it_may_write_what_they_are_staged_in() -> None:
    reader = parse_grants("b@%", ["GRANT SELECT, RELOAD ON *.* TO `b`@`%`"])
    assert lacks_for_restores(reader)[:3] == ("CREATE", "DROP", "ALTER")
    assert "SELECT" not in lacks_for_restores(reader)
    privileges = grant_for_restores("r@%").partition(" ON ")[0]
    for where in ("*.*", f"`{STAGING}`.*"):
        assert lacks_for_restores(parse_grants("r@%", [f"{privileges} ON {where} TO `r`@`%`"])) == ()
    assert lacks_for_restores(parse_grants("r@%", [f"{privileges} ON `shop`.* TO `r`@`%`"]))
    assert account_for_restores().endswith(" ON *.* TO 'backupd_restore'@'localhost';")
