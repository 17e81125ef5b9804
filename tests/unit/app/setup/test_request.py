"""What is wrong with a request of `backupd setup` is said at once, each with its option; a plan changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backupd.app.setup.installation import carry_out, configuration_text, outline, policy_text
from backupd.app.setup.request import Found, Request, look
from backupd.engine.server.service_account import ACCOUNT, ServiceAccount, account_for, dialect_of_greeting
from backupd.engine.sql.dialect import dialect_of
from backupd.model.errors import BackupdError, ConfigurationError, RefusedError
from backupd.model.server_facts import Flavour, Version
from policies.lint import advice, contradictions
from policies.load import load
from tests.support.keys import Keys, gpg
from tests.support.servers.mariadb import PrivateServer


def request(base: Path, server: PrivateServer) -> Request:
    return Request(
        base / "etc" / "backupd.yaml",
        base / "state",
        base / "backups" / "repository",
        base / "restores",
        server="shop",
        socket=str(server.socket),
    )


def problems(asked: Request) -> dict[str, str]:
    with pytest.raises(ConfigurationError) as raised:
        look(asked, {})
    assert raised.value.exit_code == 2
    return {problem.field: problem.message for problem in raised.value.problems}


def tree(base: Path) -> list[str]:
    return sorted(str(path) for path in base.rglob("*"))


def test_a_plan_says_what_will_be_done_and_does_nothing(short_tmp: Path, shared_server: PrivateServer) -> None:
    shared_server.execute(f"RENAME USER {ACCOUNT} TO away@localhost")
    try:
        planned = outline(look(request(short_tmp, shared_server), {}))
        assert shared_server.query(f"SELECT 1 FROM mysql.user WHERE user = '{ACCOUNT.partition('@')[0]}'") == []
    finally:
        shared_server.execute(f"RENAME USER away@localhost TO {ACCOUNT}")
    text = "\n".join(planned.steps)
    for words in ("CREATE USER backupd@localhost", "REPLICATION SLAVE", "backups/repository", "recovery_window: 14d"):
        assert words in text, text
    assert "IDENTIFIED BY '...'" in text
    assert tree(short_tmp) == []


def test_every_mistake_is_said_at_once_with_its_option(
    short_tmp: Path, shared_server: PrivateServer, keys: Keys
) -> None:
    (short_tmp / "etc" / "policies").mkdir(parents=True)
    (short_tmp / "etc" / "backupd.yaml").write_text("mine")
    (short_tmp / "etc" / "policies" / "first.yaml").write_text("mine")
    (short_tmp / "state").write_text("a file")
    (short_tmp / "backups" / "repository").mkdir(parents=True)
    (short_tmp / "backups" / "repository" / "repository.json").write_text("{}")
    (short_tmp / "secret.asc").write_bytes(gpg(keys.secret_home, "--armor", "--export-secret-keys"))
    before = tree(short_tmp)
    found = problems(
        replace(
            request(short_tmp, shared_server),
            server="-shop",
            mail="nobody",
            smtp="http://x",
            restores=Path("relative"),
            recipients=(short_tmp / "secret.asc",),
        )
    )
    assert set(found) == {
        "--server", "--mail-to", "--smtp", "--restores", "--config", "--state", "--destination", "--recipient",
        "--admin-file",
    }  # fmt: skip
    assert "is there already" in found["--config"]
    assert "private key" in found["--recipient"]
    assert "--account-file" in found["--admin-file"]  # the account is there
    assert "holds backups already" in found["--destination"]
    assert tree(short_tmp) == before
    assert problems(replace(request(short_tmp / "new", shared_server), socket=str(short_tmp / "none"))) == {
        "--socket": f"no server answers at {short_tmp}/none"
    }


def test_what_fails_half_way_leaves_nothing_behind(
    short_tmp: Path, shared_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (short_tmp / "etc").mkdir()
    shared_server.execute(f"RENAME USER {ACCOUNT} TO away@localhost")
    try:
        found = look(request(short_tmp, shared_server), {})
        before = tree(short_tmp)
        lacking = ServiceAccount(("RELOAD", "NO SUCH PRIVILEGE"), plugins=False)
        with pytest.raises(BackupdError):
            carry_out(replace(found, account=lacking), lambda _what: None)
        assert tree(short_tmp) == before
        monkeypatch.setattr("backupd.app.setup.installation.configuration_text", lambda *_given: "nonsense: 1\n")
        with pytest.raises(ConfigurationError):
            carry_out(found, lambda _what: None)
        assert tree(short_tmp) == before
        assert shared_server.query("SELECT 1 FROM mysql.user WHERE user = 'backupd'") == []
    finally:
        shared_server.execute(f"RENAME USER away@localhost TO {ACCOUNT}")


def test_two_at_once_leave_the_keys_of_the_first_alone(short_tmp: Path, shared_server: PrivateServer) -> None:
    """What the first has sealed is lost without them."""
    (short_tmp / "etc").mkdir()
    shared_server.execute(f"RENAME USER {ACCOUNT} TO away@localhost")
    try:
        found = look(request(short_tmp, shared_server), {})

        def meanwhile(what: str) -> None:
            if what == "configuration":
                with pytest.raises(RefusedError, match="at work"):
                    carry_out(found, lambda _what: None)

        made = carry_out(found, meanwhile)
        before = tree(short_tmp)
        with pytest.raises(ConfigurationError, match="setup cannot begin"):
            carry_out(found, lambda _what: None)
        assert [one for one in before if one not in tree(short_tmp)] == []
        assert made.restore_key.encode() in gpg(found.request.secret_home, "--with-colons", "--list-secret-keys")
    finally:
        shared_server.execute(f"DROP USER IF EXISTS {ACCOUNT}")
        shared_server.execute(f"RENAME USER away@localhost TO {ACCOUNT}")


@pytest.mark.parametrize("binlog", [True, False])
@pytest.mark.parametrize("increments", [True, False])
def test_check_has_nothing_to_say_about_the_first_policy(
    binlog: bool, increments: bool, tmp_path: Path, shared_server: PrivateServer
) -> None:
    asked = replace(
        request(tmp_path, shared_server),
        server="on",
        destination=tmp_path / "a folder",
        mail="dba@example.com",
        binlog=binlog,
        account_file=shared_server.client_file(),
    )
    known = look(replace(asked, config=tmp_path / "elsewhere" / "c.yaml"), {})
    found = Found(asked, known.socket, known.info, known.tool, increments, None, {}, ("/etc/mysql", "/etc/my cnf"))
    asked.policy.parent.mkdir(parents=True)
    asked.policy.write_text(policy_text(found))
    asked.config.write_text(configuration_text(found, ["A" * 40], "1234567E" + "1" * 32))
    loaded = load(asked.config)
    policy = loaded.policies["first"]
    assert advice(policy, loaded.configuration) == []
    assert contradictions(policy) == []
    assert loaded.configuration.encryption.signing_key == "1234567E" + "1" * 32
    assert list(loaded.configuration.servers) == ["on"]
    assert (policy.physical is not None and policy.physical.incremental is not None) is increments


def test_the_account_may_do_what_its_server_knows() -> None:
    mariadb = account_for(dialect_of(Flavour.MARIADB, Version(10, 11, 19)), rocksdb=True).statements()
    assert mariadb[1].startswith("GRANT RELOAD, PROCESS, LOCK TABLES, BINLOG MONITOR, SUPER, REPLICATION SLAVE, SELECT")
    mysql = account_for(dialect_of_greeting("8.4.3"), clones=True).statements("p")
    assert mysql[0] == "CREATE USER backupd@localhost IDENTIFIED BY 'p'"
    assert "BACKUP_ADMIN" in mysql[1]
    assert "XA_RECOVER_ADMIN" in mysql[1]
    assert mysql[2] == "GRANT INSERT, DELETE ON mysql.plugin TO backupd@localhost"
    assert "BACKUP_ADMIN" not in account_for(dialect_of_greeting("5.7.44")).statements()[1]
