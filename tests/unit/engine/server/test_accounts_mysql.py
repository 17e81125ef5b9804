"""The same on MySQL, whose answers are less of a script: of the private root, or of a server that is named."""

from __future__ import annotations

import subprocess

import pytest

from backupd.engine.server.accounts import read_accounts
from backupd.engine.sql.client import Connection
from backupd.model.server_facts import Version
from tests.support.servers.mysql import MySQLServer, beside, mysqld, release_of, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

_OBJECTS = ("CREATE DATABASE shop", "CREATE TABLE shop.t (a INT, b INT)", "CREATE PROCEDURE shop.p() SELECT 1")
_ACCOUNTS = (
    "CREATE USER u1@localhost IDENTIFIED BY 'one'",
    "CREATE USER `o'brien`@`%.ex_ample.com` IDENTIFIED BY 'x'",
    r"CREATE USER `back\slash`@`10.0.0.%` IDENTIFIED BY 'a'",
    "CREATE USER ''@'%'",
    "CREATE USER `größe 数据`@localhost",
    "GRANT PROCESS, REPLICATION CLIENT ON *.* TO u1@localhost WITH GRANT OPTION",
    r"GRANT SELECT ON `my\_db%`.* TO u1@localhost",
    "GRANT PROXY ON `o'brien`@`%.ex_ample.com` TO u1@localhost",
    "GRANT SELECT (a), UPDATE (b) ON shop.t TO u1@localhost",
    "GRANT EXECUTE ON PROCEDURE shop.p TO u1@localhost",
)
_SINCE_5_7 = (
    r"""ALTER USER `back\slash`@`10.0.0.%` REQUIRE SUBJECT '/CN=it''s \\ me' AND ISSUER 'x'
    WITH MAX_QUERIES_PER_HOUR 5 PASSWORD EXPIRE INTERVAL 30 DAY ACCOUNT LOCK""",
)
_SINCE_8 = (
    r"CREATE ROLE reader, writer@`10.%`, standard, `odd'ro\le``x`",
    "GRANT SELECT ON shop.* TO reader",
    "GRANT reader TO writer@`10.%` WITH ADMIN OPTION",
    "GRANT writer@`10.%`, `odd'ro\\le``x` TO u1@localhost",
    "SET DEFAULT ROLE writer@`10.%`, `odd'ro\\le``x` TO u1@localhost",
    "SET GLOBAL mandatory_roles = 'standard'",
    "ALTER USER ''@'%' DEFAULT ROLE standard",
    "ALTER USER u1@localhost IDENTIFIED BY 'two' RETAIN CURRENT PASSWORD",
    r"""CREATE USER careful@localhost IDENTIFIED BY 'q' FAILED_LOGIN_ATTEMPTS 3 PASSWORD_LOCK_TIME 2
    COMMENT 'it''s \\ mine'""",
    "GRANT BACKUP_ADMIN, SYSTEM_VARIABLES_ADMIN ON *.* TO careful@localhost WITH GRANT OPTION",
    "GRANT SELECT ON *.* TO careful@localhost",
    "SET GLOBAL partial_revokes = ON",
    "REVOKE SELECT ON mysql.* FROM careful@localhost",
)


def _described(server: MySQLServer) -> dict[str, list[str]]:
    server.execute("SET SESSION sql_mode = ''")
    found: dict[str, list[str]] = {}
    for user, host in server.query("SELECT User, Host FROM mysql.user"):
        name = f"`{user.replace('`', '``')}`@`{host}`"
        lines = [row[0] for row in server.query(f"SHOW CREATE USER {name}")] if server.version >= Version(5, 7) else []
        found[name] = lines + sorted(row[0] for row in server.query(f"SHOW GRANTS FOR {name}"))
    if server.roles:
        found["second passwords"] = [
            str(row)
            for row in server.query(
                "SELECT User, JSON_EXTRACT(User_attributes, '$.additional_password') FROM mysql.user ORDER BY "
                "User, Host"
            )
        ]
    return found


def _client(server: MySQLServer, sql: str, *options: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [beside(mysqld(), "mysql"), "--no-defaults", f"--socket={server.socket}", "--user=root", *options],
        input=sql.encode(),
        capture_output=True,
        check=False,
    )


def test_accounts_replayed_on_an_empty_mysql_server_are_those_of_the_source() -> None:
    flavour, version = release_of(mysqld())
    with MySQLServer(binlog=False) as source, MySQLServer(binlog=False) as target:
        source.create_backup_users()
        source.execute(
            *_OBJECTS,
            *_ACCOUNTS,
            *(_SINCE_5_7 if version >= Version(5, 7) else ()),
            *(_SINCE_8 if source.roles else ()),
        )
        expected = _described(source)
        with Connection(socket=str(source.socket), user="root").connect() as session:
            accounts = read_accounts(session, flavour, version)
        assert accounts.problems == ()
        first = _client(target, accounts.sql, "--force").stderr.decode()
        assert first.count("ERROR") == 2, first
        target.execute(*_OBJECTS)
        again = _client(target, accounts.sql)
        assert again.returncode == 0, again.stderr
        assert _described(target) == expected
        target.connect(user="u1", password="one").close()  # the first of two passwords, or the only one
        if target.roles:
            target.connect(user="u1", password="two").close()
