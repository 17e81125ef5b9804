from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.engine.sql.client import Connection
from backupd.engine.toolset import physical_tool
from backupd.process.run_context import RunContext
from backupd.transfer.records.encryption import Unsealer
from restore.datadir.checks import compare_with_witness
from restore.fetch.objects import fetch
from restore.fetch.sources import Loaded, Sources
from restore.runbook.backup_runbook import prepare_command, render_runbook
from restore.runbook.shared_steps import OWNER, render_unpack
from tests.support import sample
from tests.support.keys import Keys
from tests.support.restores.builder import files_below
from tests.support.restores.taken import Taken, take_backup
from tests.support.servers.mariadb import PrivateServer, query, quote_name

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the runbook is for root")
BARE = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/nonexistent", "LC_ALL": "C.UTF-8"}


def commands(runbook: str) -> str:
    """Every shell block, word for word, as one script."""
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", runbook, re.MULTILINE | re.DOTALL))


def follow(taken: Taken, keys: Keys, datadir: Path, **more: str) -> subprocess.CompletedProcess[str]:
    runbook = (taken.folder / f"servers/shop/{taken.header.backup_id}/RUNBOOK.md").read_text()
    environment = BARE | {"REPOSITORY": str(taken.folder), "DATADIR": str(datadir), "GNUPGHOME": str(keys.secret_home)}
    return subprocess.run(
        ["sh", "-c", commands(runbook)], env=environment | more, cwd="/", text=True, check=False, capture_output=True
    )


def check_restored(datadir: Path, taken: Taken) -> None:
    with PrivateServer(datadir=datadir, options={"skip_grant_tables": None}) as server:
        checks, compared = compare_with_witness(
            Connection(socket=str(server.socket), user="root"),
            taken.witness,
            taken.body.facts.position,
            RunContext(workers=2),
        )
    assert [check.outcome for check in checks] == ["passed", "passed", "passed"], checks
    assert (compared.equal, compared.unseen) == (len(taken.witness.checksums), 0)


@needs_root
def test_the_runbook_followed_word_for_word_gives_the_same_data_and_leaves_the_repository_alone(
    taken: Taken, keys: Keys, short_tmp: Path
) -> None:
    before = files_below(taken.folder)
    done = follow(taken, keys, short_tmp / "mysql")
    assert done.returncode == 0, done.stdout + done.stderr
    assert files_below(taken.folder) == before
    assert sorted(path.name for path in short_tmp.iterdir()) == ["mysql"]
    check_restored(short_tmp / "mysql", taken)


@needs_root
def test_the_runbook_brings_back_hostile_names_and_tables_from_elsewhere_beside_their_living_source(
    keys: Keys, short_tmp: Path
) -> None:
    with PrivateServer(options={"innodb_page_size": "8k", "innodb_undo_tablespaces": 2}) as source:
        source.create_backup_users()
        pairs = [pair for pair in sample.create_hostile_names(source) if pair[0] != "xtrabackup_info"]
        source.execute("DROP DATABASE IF EXISTS xtrabackup_info")  # the tool's own file has that name
        elsewhere = short_tmp / "else where"
        elsewhere.mkdir(mode=0o777)
        elsewhere.chmod(0o777)
        source.execute(
            f"CREATE TABLE `quo'te\"s`.`far away` (a INT PRIMARY KEY) DATA DIRECTORY='{elsewhere}'",
            "INSERT INTO `quo'te\"s`.`far away` VALUES (1), (2)",
        )
        taken = take_backup(source, keys, short_tmp / "repository")
        live = files_below(elsewhere)
        done = follow(taken, keys, short_tmp / "mysql")
        assert done.returncode == 0, done.stdout + done.stderr
        assert files_below(elsewhere) == live
        options: dict[str, str | int | None] = {
            "innodb_page_size": "8k",
            "innodb_undo_tablespaces": 2,
            "skip_grant_tables": None,
        }
        with PrivateServer(datadir=short_tmp / "mysql", options=options) as copy, copy.connect() as connection:
            assert query(connection, "SELECT COUNT(*) FROM `quo'te\"s`.`far away`") == [(2,)]
            query(connection, "ALTER TABLE `quo'te\"s`.`far away` ADD COLUMN b INT")
            for pair in pairs:
                assert query(connection, f"SELECT COUNT(*) FROM {quote_name(*pair)}") == [(3,)]
        assert files_below(elsewhere) == live


@needs_root
@pytest.mark.parametrize("obstacle", ["no key", "not empty", "damaged object"])
def test_the_runbook_stops_at_the_first_obstacle(taken: Taken, keys: Keys, short_tmp: Path, obstacle: str) -> None:
    more = {}
    if obstacle == "no key":
        more["GNUPGHOME"] = str(keys.public_home)
    elif obstacle == "not empty":
        (short_tmp / "mysql").mkdir()
        (short_tmp / "mysql/mine").write_text("precious")
    else:
        taken = taken.copy(short_tmp / "repository")
        largest = max(taken.header.objects, key=lambda item: item.size)
        path = next((taken.folder / "objects").glob(f"*/{largest.name}"))
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.unlink()
        path.write_bytes(content)
    done = follow(taken, keys, short_tmp / "mysql", **more)
    assert done.returncode != 0
    assert not (short_tmp / "mysql/ibdata1").exists()


def test_what_stands_in_the_clear_names_no_table_and_no_host(taken: Taken) -> None:
    facts = taken.body.facts
    text = render_runbook(taken.header, taken.body, destinations=["local"])
    user_files = [
        entry.path
        for entry in taken.body.entries
        if "/" in entry.path and entry.path.split("/")[0] not in ("mysql", "sys", "performance_schema")
    ]
    assert len(user_files) > 20
    for path in user_files:
        schema, _, file = path.partition("/")
        assert path not in text
        name = file.split(".")[0]
        # Within a word it is another one: lc_messages_dir is an option.
        assert not re.search(rf"\b{re.escape(name)}\b", text) or file == "db.opt"
        assert not re.search(rf"\b{re.escape(schema)}\b", text) or schema == taken.header.server
    for secret in (facts.server.hostname, sample.MARKER, "orders", "customers", str(taken.folder)):
        assert secret not in text
    assert taken.header.backup_id in text
    assert taken.header.recipients[0] in text


def test_its_prepare_is_the_command_that_the_executor_runs(taken: Taken, keys: Keys, short_tmp: Path) -> None:
    tool = physical_tool(taken.body.facts.server)
    sources = Sources([taken.destination], Unsealer(keys.secret_home))
    fetch(Loaded(taken.header, taken.body), sources, short_tmp, RunContext(workers=2))
    (step,) = tool.prepare(short_tmp, memory=300 << 20)
    ours = prepare_command(step.plain.program, short_tmp, 300 << 20)
    assert replace(step.plain, argv=(step.plain.program, *step.plain.argv[1:]), user=OWNER) == ours
    shown = ours.render().replace(str(short_tmp), "$WORK/data").replace(OWNER, "$OWNER")
    text = render_runbook(taken.header, taken.body, destinations=["local"])
    assert re.sub(r"=\d+M", "=300M", text).count(shown) == 1


def test_the_script_beside_it_is_the_one_that_was_sealed(taken: Taken) -> None:
    script = render_unpack(taken.header.backup_id, taken.body.entries, taken.header.objects)
    assert script.startswith(b"#!/bin/sh\n")
