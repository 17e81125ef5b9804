from __future__ import annotations

from pathlib import Path

import pytest

from backupd.app.context.settings import DEFAULT_FILE, load_settings, settings_file
from backupd.model.errors import ConfigurationError, NotFoundError, RefusedError, UsageError
from storage.config import FilesystemConfig
from tests.support.catalog.configuration_files import CONFIGURATION, write


def test_one_server_brings_its_policy_its_destinations_and_its_connection(tmp_path: Path) -> None:
    (tmp_path / "db1.password").write_text("ge heim#'\n")
    (tmp_path / "db1.password").chmod(0o600)
    reach = "host: db1.example.com, port: 3307, user: backup, password_file: db1.password"
    text = CONFIGURATION.replace("{policy: gold}", f"{{policy: gold, {reach}}}")
    settings = load_settings(write(tmp_path, text))
    server = settings.server("db1")
    assert (server.name, server.policy_name, server.owner) == ("db1", "gold", "mysql")
    assert server.policy is settings.policies["gold"]
    assert list(server.required) == ["local"]
    assert server.others == {}
    destination = server.required["local"]
    assert isinstance(destination, FilesystemConfig)
    assert destination.path == Path("/srv/backups")
    assert settings.destination("local") is destination
    connection = server.connection()
    assert (connection.host, connection.port, connection.user) == ("db1.example.com", 3307, "backup")
    assert connection.password == "ge heim#'"
    assert "ge heim" not in repr(connection)
    assert "ge heim" not in repr(settings)


def test_a_password_may_come_from_the_environment(tmp_path: Path) -> None:
    text = CONFIGURATION.replace("{policy: gold}", "{policy: gold, socket: db.sock, user: u, password_env: DB1}")
    server = load_settings(write(tmp_path, text)).server("db1")
    connection = server.connection({"DB1": "geheim"})
    assert (connection.password, connection.socket) == ("geheim", str(tmp_path / "db.sock"))
    with pytest.raises(ConfigurationError, match="environment has no DB1"):
        server.connection({})


def test_a_password_file_that_is_missing_is_named(tmp_path: Path) -> None:
    text = CONFIGURATION.replace("{policy: gold}", "{policy: gold, password_file: nowhere}")
    with pytest.raises(ConfigurationError, match=str(tmp_path / "nowhere")):
        load_settings(write(tmp_path, text)).server("db1").connection()


def test_names_that_are_not_there_are_named_with_what_is(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path))
    with pytest.raises(NotFoundError, match="did you mean `db1`"):
        settings.server("bd1")
    with pytest.raises(NotFoundError, match="known: local"):
        settings.destination("xyz")


def test_a_machine_without_a_decryption_key_says_so_when_it_should_restore(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path))
    assert settings.restore is None
    with pytest.raises(ConfigurationError, match="decryption key"):
        settings.needs_restore()
    settings = load_settings(write(tmp_path, CONFIGURATION + "restore: {gnupg_home: secret}\n"))
    assert settings.needs_restore().gnupg_home == tmp_path / "secret"


def test_the_file_is_named_or_in_the_environment_or_in_etc(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert load_settings(None, {"BACKUPD_CONFIG": str(path)}).file == path
    assert settings_file(Path("x"), {"BACKUPD_CONFIG": "y"}) == Path("x")
    assert settings_file(None, {"BACKUPD_CONFIG": ""}) == DEFAULT_FILE


def test_everything_in_the_file_is_reachable(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, CONFIGURATION + "spool: s\n"))
    assert settings.catalog == "sqlite:////var/lib/backupd/catalog.db"
    assert settings.spool == tmp_path / "s"
    assert set(settings.servers) == {"db1"}
    assert settings.encryption.recipients == ("ops@example.com",)
    assert settings.alerts.email is None
    assert settings.api.listen == "127.0.0.1:8642"


def test_labels_name_the_servers_that_have_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "servers.d").mkdir()
    (tmp_path / "servers.d" / "a.yaml").write_text(
        "db2: {policy: gold, labels: {env: prod}}\ndb3: {policy: gold, labels: {env: prod, site: a}}\n"
        "db4: {policy: gold, labels: {env: test, site: b}, user: u, password_env: NO}\n"
    )
    settings = load_settings(write(tmp_path))
    assert settings.labelled(["env=prod"]) == ("db2", "db3")
    assert settings.labelled(["env=prod", "site=a"]) == ("db3",)
    assert settings.labelled(["env=prod", "site=b"]) == ()
    with pytest.raises(NotFoundError, match="did you mean `env=test`"):
        settings.labelled(["env=tset"])
    with pytest.raises(UsageError, match="'env' is not a label"):
        settings.labelled(["env"])
    with pytest.raises(UsageError, match="exclude each other"):
        settings.labelled(["env=prod"], "db2")
    assert settings.followed() == dict.fromkeys(("db1", "db2", "db3", "db4"), "gold")
    with pytest.raises(ConfigurationError, match=r"servers\.d/a\.yaml"):
        settings.server("db4").connection({})


GROUP = """\
  db1: {host: one.example.com, user: backup}
  db2: {socket: two.sock, password_env: DB2}
  shop: {members: [db1, db2], owner: maria, policy: gold}
"""


def test_a_group_is_reached_through_a_member_and_stays_the_server(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, CONFIGURATION.replace("  db1: {policy: gold}\n", GROUP)))
    assert list(settings.servers) == ["shop"]
    group = settings.server("shop")
    assert (group.is_group, list(group.ways), group.member) == (True, ["db1", "db2"], "")
    with pytest.raises(RefusedError, match="shop is a group, which has no address") as refused:
        group.connection()
    assert refused.value.hint == "it is reached through a member: db1, db2"
    one = group.through("db1")
    assert (one.name, one.member, one.policy_name, one.owner) == ("shop", "db1", "gold", "maria")
    assert (one.connection().host, one.connection().user) == ("one.example.com", "backup")
    two = settings.reached("db2")
    assert (two.name, two.connection({"DB2": "x"}).socket) == ("shop", str(tmp_path / "two.sock"))
    with pytest.raises(ConfigurationError, match=r"servers\.db2\.password_env"):
        two.connection({})
    assert [(way.name, way.member) for way in settings.ways()] == [("shop", "db1"), ("shop", "db2")]


def test_a_member_is_no_server_and_the_message_names_its_group(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, CONFIGURATION.replace("  db1: {policy: gold}\n", GROUP)))
    with pytest.raises(NotFoundError, match="db1 is a member of the group shop") as unknown:
        settings.server("db1")
    assert "name that" in unknown.value.hint
    with pytest.raises(NotFoundError, match="shop has no member 'bd1'; did you mean `db1`"):
        settings.server("shop").through("bd1")
