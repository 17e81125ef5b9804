"""`backupd token`, `backupd audit` and `backupd run-api`, by the real service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backupd.app.context.access import PREFIX
from backupd.catalog.session import open_catalog
from backupd.cli.main import main
from tests.support.service.house import Office


@pytest.fixture
def config(tmp_path: Path) -> str:
    office = Office(tmp_path)
    open_catalog(office.write().catalog).close()
    return str(office.file)


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> object:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_token_is_made_listed_and_revoked(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = _json(
        capsys,
        "token",
        "create",
        "--role",
        "operator",
        "--name",
        "eva",
        "--server",
        "db1",
        "--expires",
        "90d",
        "--config",
        config,
    )
    assert isinstance(made, dict)
    assert made["token"].startswith(PREFIX)
    assert (made["role"], made["servers"], made["name"]) == ("operator", ["db1"], "eva")
    assert made["expires_at"] is not None
    listed = _json(capsys, "token", "list", "--config", config)
    assert isinstance(listed, list)
    assert "token" not in listed[0]
    assert listed[0]["id"] == made["id"]
    assert main(["token", "revoke", made["id"], "--config", config]) == 0
    assert "eva is revoked" in capsys.readouterr().out
    assert main(["token", "list", "--config", config]) == 0
    assert "revoked" in capsys.readouterr().out


def test_the_secret_stands_alone_on_its_line_so_that_it_can_be_copied(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["token", "create", "--role", "viewer", "--name", "grafana", "--config", config]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(PREFIX)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--role", "root", "--name", "x"), "roles are viewer, operator, admin"),
        (("--role", "viewer", "--name", "x", "--expires", "soon"), "write 90d"),
        (("--role", "viewer", "--name", "x", "--expires", "2020-01-01T00:00:00Z"), "in the past"),
        (("--role", "viewer", "--name", "x", "--server", "db9"), "no server 'db9'"),
    ],
)
def test_a_wrong_wish_is_told_with_the_next_step(
    config: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["token", "create", *words, "--config", config]) in (1, 2)
    assert said in capsys.readouterr().err


def test_the_audit_tells_who_did_what_and_whether_it_is_whole(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(["token", "create", "--role", "viewer", "--name", "grafana", "--config", config])
    capsys.readouterr()
    entries = _json(capsys, "audit", "--config", config)
    assert isinstance(entries, list)
    assert (entries[0]["action"], entries[0]["via"], entries[0]["outcome"]) == ("token-created", "cli", "done")
    assert main(["audit", "--config", config]) == 0
    assert "token-created" in capsys.readouterr().out
    assert main(["audit", "--verify", "--config", config]) == 0
    assert entries[0]["digest"] in capsys.readouterr().out
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog, catalog.database.write() as connection:
        connection.exec_driver_sql("DROP TRIGGER audit_no_update")
        connection.exec_driver_sql("UPDATE audit SET actor = 'nobody'")
    assert main(["audit", "--verify", "--config", config]) == 1
    assert "entry 1 was altered" in capsys.readouterr().out


def test_a_descriptor_that_is_no_socket_is_told_in_words(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-api", "--fd", "999", "--config", config]) == 2
    assert "no listening socket" in capsys.readouterr().err
