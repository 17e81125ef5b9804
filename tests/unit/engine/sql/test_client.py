"""Connection values, option files as the clients read them, and sessions."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backupd.engine.sql.client import Connection, error_code, is_denied
from backupd.engine.sql.option_files import CLIENT_GROUPS, read_option_file
from backupd.model.errors import ConfigurationError, ServerError
from backupd.model.table import quote_name
from backupd.process.runtime import render_options
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_USER, PrivateServer

AWKWARD = r"""
# a comment
; another
[mysqld]
user = mysql
socket = /nowhere
[client]
user = "ba#ck'up"   # who
password = 'p\\a\s\"ss#word'#tail
loose-compress
socket=/run/a b.sock
ssl_ca = /etc/ca.pem
[mysqldump]
max_allowed_packet=64M
[client] ; text behind
port=33\061
host =
password="x\qy\t\n"
"""


def _as_the_clients_read(path: Path) -> str:
    """What my_print_defaults prints, names as ours are: with dashes, without loose-."""
    done = subprocess.run(
        ["my_print_defaults", f"--defaults-file={path}", *CLIENT_GROUPS], capture_output=True, check=True
    )

    def rename(match: re.Match[str]) -> str:
        return "--" + match[1].replace("_", "-").removeprefix("loose-")

    return re.sub(r"^--([\w-]+)", rename, done.stdout.decode(), flags=re.MULTILINE)


def _as_we_read(path: Path) -> str:
    read = read_option_file(path)
    assert not read.problems
    return "".join(f"--{o.name}\n" if o.value is None else f"--{o.name}={o.value}\n" for o in read.options)


def test_an_awkward_option_file_reads_as_my_print_defaults_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "my.cnf"
    path.write_text(AWKWARD)
    assert _as_we_read(path) == _as_the_clients_read(path)


def test_includes_are_followed_as_the_clients_follow_them(tmp_path: Path) -> None:
    folder = tmp_path / "conf.d"
    folder.mkdir()
    (folder / "b.cnf").write_text("[client]\nuser=b\n")
    (folder / "a.cnf").write_text("[client]\nuser=a\npassword=from-a\n")
    (folder / "c.cnf~").write_text("[client]\nuser=never\n")
    (tmp_path / "one.cnf").write_text("[client]\nport=3307\n[mysqld]\nport=1\n")
    path = tmp_path / "my.cnf"
    path.write_text(f"[client]\nuser=first\n!include {tmp_path}/one.cnf\n!includedir {folder}\nhost=h\n")
    assert _as_we_read(path) == _as_the_clients_read(path)
    assert read_option_file(path).value("user") == "b"


@settings(max_examples=30, deadline=None)
@given(password=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40))
def test_every_password_survives_the_way_through_an_option_file(
    tmp_path_factory: pytest.TempPathFactory, password: str
) -> None:
    connection = Connection(socket="/run/x.sock", user="backup", password=password)
    path = tmp_path_factory.mktemp("options") / "my.cnf"
    path.write_text(render_options(connection.option_groups()), encoding="utf-8")
    again = Connection.from_config(defaults_file=path)
    assert again == connection
    if password:
        assert f"--password={password}" in _as_the_clients_read(path)


def test_what_the_configuration_says_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my.cnf"
    path.write_text("[client]\nuser=a\npassword=one\nsocket=/run/file.sock\nhost=elsewhere\nport=4000\n")
    secret = tmp_path / "secret"
    secret.write_text("two\n")
    secret.chmod(0o640)
    by_socket = Connection.from_config(socket="/run/s.sock", user="b", password_file=secret, defaults_file=path)
    assert (by_socket.socket, by_socket.user, by_socket.password) == ("/run/s.sock", "b", "two")
    by_host = Connection.from_config(host="db1", defaults_file=path)
    assert (by_host.socket, by_host.host, by_host.port) == ("", "db1", 4000)
    assert Connection.from_config(defaults_file=None).socket == "/run/mysqld/mysqld.sock"
    over_tcp = Connection.from_config(host="localhost", port=3306)
    assert (over_tcp.socket, over_tcp.option_groups()["client"]["protocol"]) == ("", "tcp")


def test_a_password_that_everybody_can_read_is_refused_with_the_chmod(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("two\n")
    secret.chmod(0o644)
    with pytest.raises(ConfigurationError) as refused:
        Connection.from_config(password_file=secret)
    assert refused.value.detail == f"{secret}: every user of this host can read the password in it"
    assert refused.value.hint == f"chmod 600 {secret}, and change the password"


def test_every_problem_of_the_files_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "my.cnf"
    path.write_text("[client]\nport=many\n!include missing.cnf\n[client\n")
    with pytest.raises(ConfigurationError) as caught:
        Connection.from_config(defaults_file=path, password_file=tmp_path / "none")
    text = str(caught.value)
    assert "no closing bracket" in text
    assert "missing.cnf" in text
    assert "'many' is not a port" in text
    assert str(tmp_path / "none") in text


@contextmanager
def nobody() -> Iterator[None]:
    os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_of_a_file_that_may_not_be_read_it_is_told_as_whom_it_was_tried_whose_it_is_and_what_to_do(
    short_tmp: Path,
) -> None:
    closed = short_tmp / "closed"
    closed.mkdir(mode=0o700)
    inside, beside = closed / "my.cnf", short_tmp / "my.cnf"
    for path in (inside, beside):
        path.write_text("[client]\nuser=a\n")
        path.chmod(0o600)
    for file, whose, remedy in (
        (
            beside,
            f"{beside} is of user root, with mode 0600",
            f"give the file to user nobody (chown, and chmod 600 {beside})",
        ),
        (
            inside,
            f"{closed} is of user root, with mode 0700",
            f"let user nobody pass through that folder (chmod o+x {closed})",
        ),
    ):
        with nobody(), pytest.raises(ConfigurationError) as caught:
            Connection.from_config(defaults_file=file)
        assert caught.value.detail == f"{file}: cannot be read: Permission denied (tried as user nobody; {whose})"
        assert caught.value.hint == f"{remedy}; or call backupd as a user who may read it"
        with nobody(), pytest.raises(ConfigurationError, match="tried as user nobody"):
            Connection.from_config(password_file=file)
    with pytest.raises(ConfigurationError) as caught:
        Connection.from_config(defaults_file=short_tmp / "none.cnf")
    assert caught.value.hint == f"write {short_tmp / 'none.cnf'}, or name another file in the configuration"


def test_a_file_that_everybody_may_write_is_refused_as_the_clients_ignore_it(tmp_path: Path) -> None:
    path = tmp_path / "my.cnf"
    path.write_text("[client]\nuser=a\n")
    path.chmod(0o666)
    with pytest.raises(ConfigurationError, match="everybody may write"):
        Connection.from_config(defaults_file=path)


def test_a_password_never_shows_in_repr_or_in_an_error(shared_server: PrivateServer) -> None:
    connection = Connection(socket=str(shared_server.socket), user=SERVICE_USER, password="wr0ng-s3cret")
    assert "s3cret" not in repr(connection)
    with pytest.raises(ServerError) as caught:
        connection.connect()
    assert "s3cret" not in str(caught.value)
    assert error_code(caught.value) == 1045
    assert is_denied(caught.value)
    assert caught.value.hint


def test_a_session_asks_and_answers_and_names_what_it_could_not(shared_server: PrivateServer) -> None:
    connection = Connection(socket=str(shared_server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
    with connection.connect() as session:
        assert session.scalar("SELECT CONCAT('100%', 'ü数')") == "100%ü数"
        assert session.records("SELECT %s AS a, %s AS b", 1, "x'") == [{"a": 1, "b": "x'"}]
        assert session.peer_pid == shared_server.pid
        assert session.thread_id == session.scalar("SELECT CONNECTION_ID()")
        session.ping()
        with pytest.raises(ServerError) as caught:
            session.query("SELECT * FROM no.thing")
        assert "no.thing" in caught.value.detail
        assert not is_denied(caught.value)


def test_limits_that_a_server_has_for_its_applications_are_none_for_a_session(server: PrivateServer) -> None:
    limits = {"max_statement_time": "0.001", "max_join_size": "1", "sql_select_limit": "1"}
    server.execute(*(f"SET GLOBAL {name} = {value}" for name, value in limits.items()))
    with Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD).connect() as session:
        assert session.scalar("SELECT SLEEP(0.1)") == 0  # one that was ended gives 1
        assert len(session.query("SELECT a.COLUMN_NAME FROM information_schema.COLUMNS a LIMIT 10")) == 10


def test_a_password_of_any_letters_logs_in(server: PrivateServer) -> None:
    password = "pä数'\"\\ #ß€"
    server.create_user("wide", password, ["SELECT"])
    with Connection(socket=str(server.socket), user="wide", password=password).connect() as session:
        assert session.scalar("SELECT CURRENT_USER()") == "wide@localhost"


def test_a_server_that_is_not_there_is_an_error_with_a_hint(tmp_path: Path) -> None:
    for connection in (
        Connection(socket=str(tmp_path / "none.sock"), user="a"),
        Connection(host="127.0.0.1", port=1, user="a"),
        Connection(host="no.such.host.invalid", user="a"),
    ):
        with pytest.raises(ServerError) as caught:
            connection.connect()
        assert caught.value.hint
        assert connection.address in caught.value.message


def test_names_are_quoted_whatever_they_contain() -> None:
    assert quote_name("a`b", "c.d") == "`a``b`.`c.d`"
