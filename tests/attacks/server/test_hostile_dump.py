"""A logical backup that somebody forged: statements among the rows, which would run with every right."""

from __future__ import annotations

import io

import pymysql
import pytest

from backupd.model.errors import StreamError
from restore.cutover.table_load import statements
from tests.support.servers.mariadb import PrivateServer

ROWS = b"INSERT INTO `t` VALUES\n(1,'a'),\n(2,'b');\n"


@pytest.mark.parametrize(
    "hostile",
    [
        b"CREATE USER evil IDENTIFIED BY 'x';\n",
        b"GRANT ALL ON *.* TO evil;\n",
        b"REPLACE INTO `t` VALUES (1);\n",
        b"INSERT INTO `mysql`.`global_priv` VALUES (1);\n",
        b"INSERT INTO `u` VALUES (1);\n",
        b"INSERT INTO t VALUES (1);\n",
        b"INSERT INTO `t` SELECT * FROM mysql.user;\n",
        b"DROP DATABASE shop;\n",
        b"SET GLOBAL general_log_file = '/etc/x';\n",
        b"SET PERSIST x = 1;\n",
        b"SET PASSWORD = PASSWORD('x');\n",
        b"/*!50000 DROP TABLE x */;\n",
        b"/*M! DROP TABLE x */;\n",
        b"LOAD DATA INFILE '/etc/passwd' INTO TABLE `t`;\n",
        b"DELIMITER ;;\nDROP TABLE x;;\n",
        b"\\! touch PWNED\n",
        b"SOURCE /etc/passwd;\n",
        b"INSTALL SONAME 'evil';\n",
        b"CALL x();\n",
        b"INSERT INTO `t` VALUES (1)",
    ],
)
def test_a_file_of_rows_holds_rows_of_its_table_and_nothing_else(hostile: bytes) -> None:
    found = []
    with pytest.raises(StreamError, match="a file of rows"):
        found += [one.is_setting for one in statements(io.BytesIO(ROWS + hostile), "t")]
    assert found in ([], [False])


def test_what_stands_behind_the_rows_in_one_line_is_no_statement_of_its_own(shared_server: PrivateServer) -> None:
    (text,) = [
        bytes(one.text) for one in statements(io.BytesIO(b"INSERT INTO `t` VALUES (1); DROP DATABASE shop;\n"), "t")
    ]
    with (
        shared_server.connect(database="mysql") as connection,
        connection.cursor() as cursor,
        pytest.raises(pymysql.err.ProgrammingError, match="syntax"),
    ):
        cursor.execute(text)
