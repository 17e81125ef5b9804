"""What `tls:` asks for, against real servers with real certificates: our own sessions, and the programs of both."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from backupd.app.context.settings_problems import findings, is_open
from backupd.backup.finding import Severity
from backupd.binlog.session import fetch
from backupd.binlog.spool_files import Spool
from backupd.binlog.stream_status import StreamState
from backupd.engine.dump.exact_reader import ExactDump
from backupd.engine.dump.insert_files import DumpRequest, DumpTool
from backupd.engine.dump.selection import mydumper_tool
from backupd.engine.sql.client import Connection, ssl_mode
from backupd.engine.sql.option_files import Tls, arguments, is_this_host
from backupd.model.errors import ConfigurationError, ServerError, ToolError
from backupd.model.server_facts import Flavour
from backupd.model.table import TableName
from tests.support.logs.streaming import (
    PASSWORD,
    USER,
    Streaming,
    assert_identical,
    insert,
    make_server,
    prepare,
)
from tests.support.servers.dumps import dump, wanted
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server
from tests.support.servers.stacks import MARIADB, MYSQL_CLONE, stacks
from tests.support.stores.folders import give_to_database, short_directory

NAME, OTHER = "127.0.0.1", "localhost"
"""The certificate is for the first; both lead to the server."""


@dataclass(frozen=True)
class Case:
    server: Server
    folder: Path

    def connection(self, tls: Tls | None, *, host: str = NAME, ca: str = "ca.pem") -> Connection:
        asked = Connection.from_config(
            host=host,
            port=self.server.port,
            user=USER,
            tls=tls,
            tls_ca=self.folder / ca if tls in (Tls.VERIFY_FULL, Tls.VERIFY_CA) else None,
        )
        return replace(asked, password=PASSWORD)


def _certificates(folder: Path) -> None:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "stranger"):
        openssl(
            "req",
            "-x509",
            *new,
            "-days",
            "30",
            "-subj",
            f"/CN=backupd test {name}",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
        )
    openssl("req", *new, "-subj", "/CN=db1.example.com", "-keyout", "server.key", "-out", "server.csr")
    (folder / "names").write_text(f"subjectAltName=DNS:db1.example.com,IP:{NAME}\n")
    openssl(
        "x509",
        "-req",
        "-in",
        "server.csr",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-days",
        "30",
        "-extfile",
        "names",
        "-out",
        "server.pem",
    )
    for path in folder.iterdir():
        give_to_database(path)
        path.chmod(0o644)


@pytest.fixture(scope="module", params=stacks(MARIADB, MYSQL_CLONE))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with short_directory() as folder:
        _certificates(folder)
        ours = {
            f"ssl_{name}": str(folder / f"{file}")
            for name, file in (("ca", "ca.pem"), ("cert", "server.pem"), ("key", "server.key"))
        }
        with make_server(request.param, **ours) as server:
            prepare(server)
            server.execute(f"GRANT ALL ON *.* TO {USER}@'%'")
            yield Case(server, folder)


def test_verify_full_takes_the_right_name_and_refuses_another_and_another_ca(case: Case) -> None:
    with case.connection(Tls.VERIFY_FULL).connect() as session:
        assert session.records("SHOW STATUS LIKE 'Ssl_cipher'")[0]["Value"]
    with pytest.raises(ServerError, match="cannot connect") as refused:
        case.connection(Tls.VERIFY_FULL, host=OTHER).connect()
    assert "`tls: verify-full` requires a certificate for the name in `host`" in refused.value.hint
    for tls in (Tls.VERIFY_FULL, Tls.VERIFY_CA):
        with pytest.raises(ServerError, match="cannot connect") as refused:
            case.connection(tls, ca="stranger.pem").connect()
        assert f"`tls: {tls}` requires a certificate of the CA in `tls_ca`" in refused.value.hint
    with pytest.raises(ServerError, match="cannot be encrypted") as refused:
        case.connection(Tls.VERIFY_FULL, ca="none.pem").connect()
    assert "`tls_ca`" in refused.value.hint
    for looser in (case.connection(Tls.VERIFY_CA, host=OTHER), case.connection(Tls.REQUIRED, host=OTHER)):
        with looser.connect() as session:
            assert session.records("SHOW STATUS LIKE 'Ssl_cipher'")[0]["Value"]
    with case.connection(Tls.OFF).connect() as session:
        assert not session.records("SHOW STATUS LIKE 'Ssl_cipher'")[0]["Value"]


@pytest.mark.parametrize("wish", ["ssl-verify-server-cert", "ssl-mode = VERIFY_IDENTITY"])
@pytest.mark.parametrize("authorities", ["ssl-ca", "ssl-capath", ""])
def test_an_option_file_that_wants_the_name_verified_is_heeded(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: str, authorities: str
) -> None:
    """Without any CA it is those of the system."""
    folder = tmp_path / "authorities"
    folder.mkdir()
    (folder / "ca.pem").write_bytes((case.folder / "ca.pem").read_bytes())
    subprocess.run(["openssl", "rehash", str(folder)], check=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(case.folder / "ca.pem"))
    where = {"ssl-ca": case.folder / "ca.pem", "ssl-capath": folder}
    file = tmp_path / "client.cnf"
    file.write_text(
        f"[client]\nuser={USER}\n{wish}\n" + (f"{authorities}={where[authorities]}\n" if authorities else "")
    )

    def asked(host: str) -> Connection:
        found = Connection.from_config(host=host, port=case.server.port, defaults_file=file)
        return replace(found, password=PASSWORD)

    with asked(NAME).connect() as session:
        assert session.records("SHOW STATUS LIKE 'Ssl_cipher'")[0]["Value"]
    with pytest.raises(ServerError, match="cannot connect") as refused:
        asked(OTHER).connect()
    assert "for another name" in refused.value.hint
    assert not is_open(asked("db1.example.com"))


def _asked_by_file(file: Path, words: str, *, port: int, host: str = NAME) -> Connection:
    file.write_text(f"[client]\nuser={USER}\n{words}\n")
    return replace(Connection.from_config(host=host, port=port, defaults_file=file), password=PASSWORD)


@pytest.mark.parametrize(
    "words", ["ssl-mode = VERIFY_CA\nssl-ca", "ssl-mode = verify_ca\nssl-capath", "ssl-ca", "ssl-capath"]
)
def test_an_option_file_that_names_authorities_trusts_no_other(case: Case, tmp_path: Path, words: str) -> None:
    for name in ("ca", "stranger"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.pem").write_bytes((case.folder / f"{name}.pem").read_bytes())
        subprocess.run(["openssl", "rehash", str(folder)], check=True)

    def asked(name: str) -> Connection:
        where = tmp_path / name if words.endswith("path") else tmp_path / name / f"{name}.pem"
        return _asked_by_file(tmp_path / "c.cnf", f"{words} = {where}", port=case.server.port or 0, host=OTHER)

    with asked("ca").connect() as session:
        assert session.records("SHOW STATUS LIKE 'Ssl_cipher'")[0]["Value"]
    with pytest.raises(ServerError, match="cannot connect") as refused:
        asked("stranger").connect()
    assert f"`{words.splitlines()[0].replace('verify_ca', 'VERIFY_CA')}` of the option file" in refused.value.hint
    assert not is_open(replace(asked("ca"), host="db1.example.com"))


DEMANDS = ["ssl-mode=REQUIRED", "ssl_mode=required", "ssl", "ssl=1", "ssl-mode=VERIFY_CA", "ssl-mode=VERIFY_IDENTITY"]
"""What option files say that demands TLS."""


@pytest.mark.parametrize(
    ("words", "tls"),
    [
        *((words, Tls.REQUIRED) for words in DEMANDS[:4]),
        ("ssl-mode = VERIFY_CA", Tls.VERIFY_CA),
        ("ssl-ca = /ca.pem", Tls.VERIFY_CA),
        ("ssl-capath = /ca", Tls.VERIFY_CA),
        ("ssl-ca = /ca.pem\nssl-verify-server-cert = 0", Tls.REQUIRED),
        ("ssl-ca = /ca.pem\nssl-mode = REQUIRED", Tls.REQUIRED),
        ("ssl-mode = DISABLED\nssl-mode = REQUIRED", Tls.REQUIRED),
        ("ssl-mode = REQUIRED\nssl-mode = PREFERRED", None),
        ("ssl\nskip-ssl", None),
        ("ssl = 0", None),
        ("", None),
    ],
)
def test_what_an_option_file_demands(tmp_path: Path, words: str, tls: Tls | None) -> None:
    """As the clients read it; the last line counts."""
    assert _asked_by_file(tmp_path / "c.cnf", words, port=3306, host="db1").tls is tls
    # The configuration wins.
    said = Connection.from_config(host="db1", defaults_file=tmp_path / "c.cnf", tls=Tls.VERIFY_FULL)
    assert (said.tls, said.tls_said) == (Tls.VERIFY_FULL, "")


def test_a_name_that_must_be_verified_is_the_strictest_demand(tmp_path: Path) -> None:
    for words in ("ssl-mode = REQUIRED\nssl-verify-server-cert", "ssl-verify-server-cert\nssl-mode = REQUIRED"):
        found = _asked_by_file(tmp_path / "c.cnf", words, port=3306, host="db1")
        assert ssl_mode(found) == "VERIFY_IDENTITY"


def test_a_mode_that_no_client_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        _asked_by_file(tmp_path / "c.cnf", "ssl-mode = REQUIERD", port=3306)
    assert "'REQUIERD' is none of" in str(refused.value)


def test_a_server_that_takes_encrypted_connections_only_says_so_to_tls_off(case: Case) -> None:
    case.server.execute("SET GLOBAL require_secure_transport = ON")
    try:
        with pytest.raises(ServerError) as refused:
            case.connection(Tls.OFF).connect()
        assert "the configuration says `tls: off`" in refused.value.hint
        assert "set `tls: verify-full`" in refused.value.hint
        with case.connection(Tls.VERIFY_FULL).connect() as session:
            assert session.scalar("SELECT 1") == 1
    finally:
        case.server.execute("SET GLOBAL require_secure_transport = OFF")


def test_a_binary_log_is_received_from_the_right_server_only(case: Case, tmp_path: Path) -> None:
    name = str(case.server.query("SHOW BINARY LOGS")[0][0])
    spool = Spool(tmp_path / "spool")

    def copies(connection: Connection) -> int:
        copied = fetch(connection, spool, name, connection_id=2**31 + 7, stall=20.0, cancel=threading.Event())
        return copied.stat().st_size

    with spool.locked():
        assert copies(case.connection(Tls.VERIFY_FULL)) > 4
        for wrong in (
            case.connection(Tls.VERIFY_FULL, host=OTHER),
            case.connection(Tls.VERIFY_FULL, ca="stranger.pem"),
            case.connection(Tls.VERIFY_CA, ca="stranger.pem"),
        ):
            with pytest.raises(ServerError):
                copies(wrong)
        for good in (
            case.connection(Tls.VERIFY_CA, host=OTHER),
            case.connection(Tls.REQUIRED, host=OTHER),
            case.connection(Tls.OFF),
        ):
            assert copies(good) > 4


def test_a_stream_verifies_its_server(case: Case, tmp_path: Path) -> None:
    with Streaming(case.server, tmp_path / "spool", connection=case.connection(Tls.VERIFY_FULL)) as streaming:
        insert(case.server, 3)
        streaming.has_all(case.server)
        assert_identical(streaming.spool, case.server)
    with Streaming(case.server, tmp_path / "wrong", connection=case.connection(Tls.VERIFY_FULL, host=OTHER)) as wrong:
        while not wrong.events:
            pass
        assert "`tls: verify-full`" in wrong.events[0].hint
        assert wrong.streamer.status().state is not StreamState.STREAMING


@pytest.mark.parametrize("program", ["backupd", "mydumper"])
def test_dumps_verify_their_server(case: Case, short_tmp: Path, program: str) -> None:
    flavour = Flavour.MYSQL if isinstance(case.server, MySQLServer) else Flavour.MARIADB
    tool: DumpTool = mydumper_tool(flavour) if program == "mydumper" else ExactDump()
    table = wanted([TableName("shop", "t")])

    def goods(connection: Connection) -> set[str]:
        return dump(tool, DumpRequest(connection, table, short_tmp)).good

    assert goods(case.connection(Tls.VERIFY_FULL)) == {"t"}
    for wrong in (case.connection(Tls.VERIFY_FULL, ca="stranger.pem"), case.connection(Tls.VERIFY_FULL, host=OTHER)):
        with pytest.raises((ToolError, ServerError), match=r"(?i)connect|ssl|tls|ended"):
            goods(wrong)


def test_a_server_without_tls_is_refused_by_all_but_off(tmp_path: Path) -> None:
    with make_server(MARIADB, skip_ssl=None) as server:
        prepare(server)
        for tls in (Tls.VERIFY_FULL, Tls.VERIFY_CA, Tls.REQUIRED):
            with pytest.raises(ServerError) as refused:
                Connection(
                    host=NAME,
                    port=server.port or 0,
                    user=USER,
                    password=PASSWORD,
                    tls=tls,
                    ssl={} if tls is Tls.REQUIRED else {"ca": "/etc/ssl/certs/ca-certificates.crt"},
                ).connect()
            assert f"`tls: {tls}` requires TLS, but the server does not offer it" in refused.value.hint
            assert "`tls: off`" in refused.value.hint
        for words in DEMANDS:
            with pytest.raises(ServerError) as refused:
                _asked_by_file(tmp_path / "c.cnf", words, port=server.port or 0).connect()
            assert "of the option file requires TLS, but the server does not offer it" in refused.value.hint
        plain = Connection(host=NAME, port=server.port or 0, user=USER, password=PASSWORD, tls=Tls.OFF)
        with plain.connect() as session:
            assert session.scalar("SELECT 1") == 1


def test_each_family_has_its_own_words() -> None:
    def asked(tls: Tls) -> Connection:
        ca = Path("/ca.pem") if tls.startswith("verify") else None
        return Connection.from_config(host="db1", user="u", tls=tls, tls_ca=ca)

    def words(tls: Tls) -> dict[str, str | None]:
        return {name: value for name, value in asked(tls).option_groups()["client"].items() if "ssl" in name}

    assert words(Tls.VERIFY_FULL) == {"ssl-ca": "/ca.pem", "ssl-verify-server-cert": None, "ssl": "1"}
    assert words(Tls.VERIFY_CA) == {"ssl-ca": "/ca.pem", "ssl-verify-server-cert": "0", "ssl": "1"}
    assert words(Tls.REQUIRED) == {"ssl-verify-server-cert": "0", "ssl": "1"}
    assert words(Tls.OFF) == {"ssl": "0"}
    assert ssl_mode(asked(Tls.VERIFY_FULL)) == "VERIFY_IDENTITY"
    assert ssl_mode(asked(Tls.VERIFY_CA)) == "VERIFY_CA"
    assert ssl_mode(asked(Tls.REQUIRED)) == "REQUIRED"
    assert ssl_mode(asked(Tls.OFF)) == "DISABLED"
    assert ssl_mode(Connection(socket="/s")) == ""
    # Where nobody names a CA it is the system's, also for programs that know of none by themselves.
    assert Connection.from_config(host="db1", tls=Tls.VERIFY_FULL).ssl["ca"]


def test_what_check_says_of_a_way() -> None:
    far = Connection(host="db1.example.com")
    assert [one.severity for one in findings(far)] == [Severity.ERROR]
    assert is_open(far)
    assert "`tls: verify-full`" in findings(far)[0].hint
    assert [one.severity for one in findings(replace(far, tls=Tls.OFF))] == [Severity.WARNING]
    assert [one.severity for one in findings(replace(far, tls=Tls.VERIFY_FULL))] == [Severity.OK]
    for none_needed in (
        Connection(socket="/s"),
        Connection(host="localhost"),
        Connection(host="127.0.0.9"),
        Connection(host="::1"),
        replace(far, ssl={"ca": "/ca.pem", "verify-server-cert": ""}),
    ):
        assert not is_open(none_needed)
        assert findings(none_needed) == []
    assert is_open(replace(far, ssl={"ca": "/ca.pem"}))
    assert not is_this_host("127.0.0.1.example.com")


@pytest.mark.parametrize("said", [{"ca": "/nowhere/ca.pem"}, {"ca": "/dev/null"}, {"ca": "/tmp"}])
def test_a_file_that_cannot_be_used_is_named(said: dict[str, str]) -> None:
    with pytest.raises(OSError, match=said["ca"]):
        arguments(Tls.VERIFY_FULL, said)
