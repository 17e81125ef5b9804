"""A name that nobody knows - of a server, a backup, a job, a destination ... - is told as such by every command that
takes one: exit 2, with what was perhaps meant and where the list is; nothing is done. The commands are those that the
parser itself has."""

from __future__ import annotations

import inspect
import sqlite3
import typing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import typer

from backupd.catalog.session import open_catalog
from backupd.cli.main import app, main
from tests.support.catalog import samples
from tests.support.keys import Keys
from tests.support.stores.folders import short_directory

KNOWN = {
    "SERVER": "shop-db1",
    "DESTINATION": "local",
    "BACKUP": samples.backup().id,
    "JOB": "20261121T120000Z-00000002",
    "SET": "money",
    "EXAMPLE": "gold",
    "LABEL": "env=prod",
}
"""What the house below has."""

NAMES = {
    "server": "SERVER",
    "into": "SERVER",
    "label": "LABEL",
    "destination": "DESTINATION",
    "to": "DESTINATION",
    "backup_id": "BACKUP",
    "job_id": "JOB",
    "raise_id": "JOB",
    "table_set": "SET",
    "recipient": "RECIPIENT",
    "challenge_id": "CHALLENGE",
    "incident": "INCIDENT",
    "proof_id": "PROOF",
    "branch": "BRANCH",
    "drop": "RESTORE",
    ("token revoke", "token"): "TOKEN",
    ("policy example", "name"): "EXAMPLE",
    ("catalog adopt", "names"): "BACKUP",
    "target": "TARGET",
}
"""What parameters name, by the parameter or by command and parameter."""

OTHERS = {
    "config",
    "as_json",
    "grace",
    "kind",
    "tables",
    "datadir",
    "rename",
    "source",
    "exclude",
    "replay_with",
    "thaw",
    "mode",
    "sql",
    "confirm",
    "keys",
    "triggers",
    "tier",
    "days",
    "subset",
    "reason",
    "since",
    "until",
    "settings",
    "actor",
    "action",
    "limit",
    "descriptor",
    "ready",
    "out",
    "files",
    "file",
    "state",
    "gtid",
    "table",
    "role",
    "name",
    "expires",
    "token",
    "adopt_all",
    "failed_at",
    "counter",
    "new_key",
    "former",
    "beside",
    "cluster",
    "node",
    "delay",
    "replicate_from",
    "server_id",
    "outcome",
    "shell",
    "words",
    "socket",
    "admin_file",
    "account_file",
    "folder",
    "restores",
    "recipient_files",
    "mail_to",
    "smtp",
}
"""Parameters that name nothing that would have to exist: a new parameter has to be put here or above."""

LISTS = {
    "SERVER": "`servers:`",
    "DESTINATION": "`destinations:`",
    "LABEL": "`labels:`",
    "BACKUP": "backupd backups",
    "JOB": "backupd jobs",
    "SET": "logical.sets",
    "RECIPIENT": "backupd keys",
    "CHALLENGE": "backupd keys",
    "INCIDENT": "backupd alerts --all",
    "BRANCH": "backupd timeline",
    "RESTORE": "backupd leftovers",
    "PROOF": "backupd proofs",
    "TOKEN": "backupd token list",
    "TARGET": "backupd backups",
    "EXAMPLE": "there are: backupd, gold",
}
"""Where the list is."""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, inner in command.commands.items():
        yield from commands(inner, (*path, name))


ALL = list(commands(typer.main.get_command(app)))


def named(path: tuple[str, ...], parameter: str) -> str | None:
    return NAMES.get((" ".join(path), parameter), NAMES.get(parameter) if parameter not in OTHERS else None)


CASES = [
    pytest.param(path, command, parameter, id=f"{' '.join(path)} {parameter.name}")
    for path, command in ALL
    for parameter in command.params
    if named(path, parameter.name)
]


def word_of(command: Any, parameter: str) -> str:
    """A word that an option of a few words takes; "" for other parameters."""
    hint = typing.get_type_hints(inspect.unwrap(command.callback)).get(parameter)
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and issubclass(kind, StrEnum)]
    return next((str(next(iter(kind))) for kind in kinds), "")


FEW_WORDS = [
    pytest.param(path, command, parameter, word, id=f"{' '.join(path)} {parameter.name}")
    for path, command in ALL
    for parameter in command.params
    if (word := word_of(command, parameter.name))
]

FINE = {
    "target": "latest",
    "since": "2026-11-21T09:00:00Z",
    "file": "policies/gold.yaml",
    "role": "viewer",
    "name": "x",
    "token": "1",
}
NEEDED = {
    ("backup", "table_set"): [KNOWN["SERVER"], "--kind", "logical"],
    ("restore", "server"): ["--datadir", "new"],
    ("restore", "target"): ["--datadir", "new"],
    ("restore", "into"): ["--tables", "a.b"],
    ("policy explain", "server"): ["--config", "backupd.yaml"],
    ("thaw", "target"): [KNOWN["SERVER"]],
    ("thaw", "raise_id"): ["--tier", "bulk"],
}
"""What else a call must have: required parameters, or what belongs to the one that is wrong."""


def typo(path: tuple[str, ...], kind: str) -> str:
    if path == ("audit",):
        return "shop-dby"  # of the other one the audit knows who was refused it
    known = KNOWN.get(kind, "20261121T120000Z-0000abcd")
    return f"backup:{KNOWN['BACKUP'][:-1]}f" if kind == "TARGET" else known[:-1] + "z"


def words(parameter: Any, value: str) -> list[str]:
    return [value] if parameter.param_type_name == "argument" else [parameter.opts[0], value]


def call(path: Sequence[str], command: Any, wrong: Any, value: str) -> list[str]:
    """The command with ``value`` for one parameter, and what it needs besides."""
    said = list(path)
    for parameter in command.params:
        if parameter is wrong:
            said += words(parameter, value)
        elif parameter.required:
            kind = named(tuple(path), parameter.name)
            said += words(parameter, FINE.get(parameter.name) or KNOWN[kind or ""])
    return said + NEEDED.get((" ".join(path), wrong.name), [])


@pytest.fixture(scope="module")
def world(keys: Keys) -> Iterator[Path]:
    """A house without its database server, for all calls: what one of them did would be seen by the next."""
    with short_directory() as path, pytest.MonkeyPatch.context() as patch:
        (path / "policies").mkdir()
        (path / "policies" / "gold.yaml").write_text(
            'physical: {full: "0 2 * * *"}\nbinlog: {stream: true}\ndestinations: {required: [local]}\n'
            'logical: {schedule: every 1d, sets: {money: {schedule: every 1d, tables: {include: ["a.*"]}}}}\n'
        )
        (path / "backupd.yaml").write_text(
            f"catalog: sqlite:///{path}/catalog.db\nspool: {path}/spool\npolicies: {path}/policies\n"
            f"servers:\n  shop-db1: {{socket: {path}/none.sock, policy: gold, labels: {{env: prod}}}}\n"
            f"destinations:\n  local: {{type: filesystem, path: {path}/repository}}\n"
            f"encryption: {{gnupg_home: {keys.public_home}, recipients: [{keys.user_id}]}}\n"
        )
        patch.chdir(path)
        # No server is there to be asked.
        patch.setattr("backupd.app.restores.execution.refuse_stranger", lambda *_asked: None)
        patch.setattr("backupd.app.restores.execution.stagings", lambda _connection: ())
        patch.setenv("BACKUPD_CONFIG", str(path / "backupd.yaml"))
        patch.setenv("BACKUPD_RUNTIME", str(path / "run"))
        with open_catalog(f"sqlite:///{path}/catalog.db") as catalog:
            catalog.backups.add(samples.backup())
            catalog.jobs.enqueue(replace(samples.job(), id=KNOWN["JOB"]))
        yield path


def rows(world: Path) -> dict[str, list[tuple[Any, ...]]]:
    with sqlite3.connect(world / "catalog.db") as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in tables if name != "audit"}


def test_every_parameter_is_known_to_name_something_or_nothing() -> None:
    strange = {
        f"{' '.join(path)}: {parameter.name}"
        for path, command in ALL
        for parameter in command.params
        if not getattr(parameter, "is_flag", False)
        and named(path, parameter.name) is None
        and parameter.name not in OTHERS
    }
    assert not strange


@pytest.mark.parametrize(("path", "command", "parameter"), CASES)
def test_a_name_that_nobody_knows_is_told_and_nothing_is_done(
    path: tuple[str, ...], command: Any, parameter: Any, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = named(path, parameter.name)
    assert kind is not None
    before = rows(world)
    value = typo(path, kind)
    code = main(call(path, command, parameter, value))
    said = capsys.readouterr().err
    assert code == 2, said
    assert value.removeprefix("backup:") in said
    assert LISTS[kind] in said, said
    if kind in KNOWN:
        assert f"did you mean `{KNOWN[kind]}`?" in said, said
    assert rows(world) == before


@pytest.mark.parametrize(("path", "command", "parameter", "word"), FEW_WORDS)
def test_a_mistyped_word_of_a_few_is_told_as_one(
    path: tuple[str, ...], command: Any, parameter: Any, word: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = rows(world)
    code = main(call(path, command, parameter, word[:-1]))
    said = capsys.readouterr().err
    assert code == 2, said
    assert f"Invalid value for '{parameter.opts[0]}': {word[:-1]!r} is not known; did you mean `{word}`?" in said
    assert rows(world) == before
