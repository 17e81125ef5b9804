"""Accounts as SQL, replayed by the flavour's own client on an empty server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from backupd.engine.server.accounts import Accounts, _Account, _mysql_account, _Row, _Script, quote_text, read_accounts
from backupd.engine.sql.client import Connection
from backupd.model.server_facts import Flavour, Version
from backupd.model.table import quote_name
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_USER, PrivateServer

_OBJECTS = (
    "CREATE DATABASE shop",
    "CREATE TABLE shop.t (a INT, b INT)",
    "CREATE PROCEDURE shop.p() SELECT 1",
    "CREATE FUNCTION shop.f() RETURNS INT DETERMINISTIC RETURN 1",
)
_ACCOUNTS = (
    "CREATE USER u1@localhost IDENTIFIED BY 'one'",
    "CREATE ROLE reader",
    "CREATE ROLE writer WITH ADMIN u1@localhost",
    r"CREATE ROLE `odd'ro\le``x`",
    "CREATE ROLE orphan",
    "REVOKE orphan FROM root@localhost",
    "CREATE ROLE plain",
    "REVOKE ADMIN OPTION FOR plain FROM root@localhost",
    "GRANT SELECT ON shop.* TO reader",
    "GRANT reader TO writer WITH ADMIN OPTION",
    """CREATE USER `o'brien`@`%.ex_ample.com` IDENTIFIED VIA ed25519 USING PASSWORD('x') OR unix_socket
    OR mysql_native_password USING PASSWORD('y')""",
    r"""CREATE USER `back\slash`@`10.0.0.%` IDENTIFIED BY 'a'
    REQUIRE SUBJECT '/CN=it''s \\ ACCOUNT LOCK' AND ISSUER 'x'
    WITH MAX_QUERIES_PER_HOUR 5 PASSWORD EXPIRE INTERVAL 30 DAY ACCOUNT LOCK""",
    "CREATE USER ''@'%'",
    "CREATE USER `a ON b; -- c`@`%`",
    "CREATE USER `größe 数据`@localhost",
    "CREATE USER expired@localhost IDENTIFIED BY 'e' PASSWORD EXPIRE NEVER",
    r"GRANT `odd'ro\le``x` TO `back\slash`@`10.0.0.%` WITH ADMIN OPTION",
    "SET DEFAULT ROLE writer FOR u1@localhost",
    "GRANT DELETE HISTORY, BINLOG REPLAY ON *.* TO expired@localhost WITH GRANT OPTION",
    r"GRANT SELECT ON `my\_db%`.* TO u1@localhost",
    "GRANT PROXY ON `o'brien`@`%.ex_ample.com` TO u1@localhost",
    "GRANT SELECT (a), UPDATE (b) ON shop.t TO u1@localhost",
    "GRANT EXECUTE ON PROCEDURE shop.p TO u1@localhost",
    "GRANT EXECUTE ON FUNCTION shop.f TO reader WITH GRANT OPTION",
    "GRANT INSERT ON shop.t TO PUBLIC",
    "ALTER USER root@localhost IDENTIFIED VIA mysql_native_password USING PASSWORD('new') OR unix_socket",
)


def _described(server: PrivateServer) -> dict[str, list[str]]:
    """Every account and role with what the server itself says of it."""
    found: dict[str, list[str]] = {}
    for user, host, is_role in server.query(
        "SELECT User, Host, COALESCE(JSON_VALUE(Priv, '$.is_role'), 0) FROM mysql.global_priv"
    ):
        name = quote_name(user) if is_role == "1" else f"{quote_name(user)}@{quote_name(host)}"
        lines = [] if is_role == "1" else [row[0] for row in server.query(f"SHOW CREATE USER {name}")]
        # As a set: a PROXY on everybody that is granted once more is listed twice.
        lines += sorted({row[0] for row in server.query(f"SHOW GRANTS FOR {name}")})
        found[name] = lines
    return found


def _replay(server: PrivateServer, accounts: Accounts, *options: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["mariadb", "--no-defaults", f"--socket={server.socket}", "--user=root", "--skip-password", *options],
        input=accounts.sql.encode(),
        capture_output=True,
        check=False,
    )


@pytest.fixture(scope="module")
def source() -> Iterator[PrivateServer]:
    with PrivateServer(options={"plugin_load_add": "auth_ed25519"}) as server:
        server.create_backup_users()
        server.execute(*_OBJECTS, *_ACCOUNTS[:-1])
        yield server


def _read(server: PrivateServer, user: str = "root", password: str = "") -> Accounts:
    with Connection(socket=str(server.socket), user=user, password=password).connect() as session:
        return read_accounts(session, Flavour.MARIADB, Version(10, 11, 19))


def test_accounts_replayed_on_an_empty_server_are_those_of_the_source(source: PrivateServer) -> None:
    expected = _described(source)
    source.execute("SET GLOBAL sql_mode = 'NO_BACKSLASH_ESCAPES,ANSI_QUOTES'")
    accounts = _read(source, SERVICE_USER, SERVICE_PASSWORD)
    assert accounts.problems == ()
    assert "ed25519" in accounts.sql.split("SET SESSION")[0]
    with PrivateServer(
        options={"plugin_load_add": "auth_ed25519", "sql_mode": "NO_BACKSLASH_ESCAPES,ANSI_QUOTES"}
    ) as target:
        first = _replay(target, accounts, "--force")
        told = first.stderr.decode()
        assert told.count("ERROR") == 4, told
        assert told.count("Table 'shop.t' doesn't exist") == 2, told
        target.execute(*_OBJECTS)
        again = _replay(target, accounts)
        assert again.returncode == 0, again.stderr
        target.execute("SET SESSION sql_mode = ''")
        assert _described(target) == expected


def test_an_existing_account_gets_the_password_of_the_source() -> None:
    with PrivateServer() as one, PrivateServer() as other:
        one.execute(
            "ALTER USER root@localhost IDENTIFIED VIA mysql_native_password USING PASSWORD('new') "
            "OR unix_socket PASSWORD EXPIRE NEVER"
        )
        with Connection(socket=str(one.socket), user="root", password="new").connect() as session:
            accounts = read_accounts(session, Flavour.MARIADB, Version(10, 11, 19))
        assert _replay(other, accounts).returncode == 0
        other.connect(password="new").close()


def test_an_account_that_may_not_look_is_told_and_nothing_is_raised(source: PrivateServer) -> None:
    source.execute("CREATE OR REPLACE USER blind@localhost IDENTIFIED BY 'b'")
    accounts = _read(source, "blind", "b")
    source.execute("DROP USER blind@localhost")
    assert len(accounts.problems) == 1
    assert "global_priv" in accounts.problems[0]
    assert "-- Not complete" in accounts.sql


def test_literals_are_what_they_were(source: PrivateServer) -> None:
    source.execute("SET SESSION sql_mode = ''")
    text = "a'b\"c\\d\n\r\x1a%_ ü数"
    assert source.scalar(f"SELECT {quote_text(text)}") == text


def test_the_forms_of_servers_before_8_are_understood() -> None:
    """As their manuals show them: such servers are tested only where one is named."""
    script = _Script()
    account = _Account.of("o'b", "10.%")
    for line in (
        "GRANT USAGE ON *.* TO 'o\\'b'@'10.%' IDENTIFIED BY PASSWORD '*2470C0C06DEE42FD1618BB99005ADCA2EC9D1E19'",
        "GRANT SELECT (`a`, `b`) ON `shop`.`t` TO 'o\\'b'@'10.%' WITH GRANT OPTION",
        "GRANT PROXY ON ''@'' TO 'o'b'@'10.%' WITH GRANT OPTION",
        "GRANT EXECUTE ON PROCEDURE `shop`.`p` TO 'o'b'@'10.%'",
        "GRANT ALL PRIVILEGES ON `a ON b`.* TO 'somebody'@'10.%'",
    ):
        script.grant(line, account, keep_tail=True)
    assert script.privileges == [
        "GRANT USAGE ON *.* TO `o'b`@`10.%` IDENTIFIED BY PASSWORD '*2470C0C06DEE42FD1618BB99005ADCA2EC9D1E19'"
    ]
    assert script.proxies == ["GRANT PROXY ON ''@'' TO `o'b`@`10.%` WITH GRANT OPTION"]
    assert script.on_objects == [
        "GRANT SELECT (`a`, `b`) ON `shop`.`t` TO `o'b`@`10.%` WITH GRANT OPTION",
        "GRANT EXECUTE ON PROCEDURE `shop`.`p` TO `o'b`@`10.%`",
    ]


def test_hashes_that_an_old_server_prints_raw_are_written_so_that_they_can_be_read() -> None:
    account = _Account.of("u", "%")
    row = _Row("sha256_password", b"$5$\x07'\\x$hash", {"CIPHER": "", "ISSUER": "", "SUBJECT": "/CN=it's"}, b"")
    line = (
        "CREATE USER 'u'@'%' IDENTIFIED WITH 'sha256_password' AS '$5$\x07'\\x$hash' REQUIRE SUBJECT '/CN=it's' "
        "PASSWORD EXPIRE DEFAULT ACCOUNT UNLOCK"
    )
    first, second = _mysql_account(account, row, line, _Script(), hexadecimal=False)
    assert first == (
        "CREATE USER IF NOT EXISTS `u`@`%` IDENTIFIED WITH 'sha256_password' AS '$5$\x07\\'\\\\x$hash' "
        "REQUIRE SUBJECT '/CN=it\\'s' PASSWORD EXPIRE DEFAULT ACCOUNT UNLOCK"
    )
    assert second == first.replace("CREATE USER IF NOT EXISTS", "ALTER USER")
