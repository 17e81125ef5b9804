"""A bucket that was emptied by plain deletions comes back: by the command, and by RECOVER.md's lines of aws."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from backupd.app.metacopies.recover_document import recover_versions_text
from backupd.catalog.session import open_catalog
from backupd.cli.main import main
from backupd.model.text import format_time
from backupd.transfer.deletion import is_whole
from backupd.transfer.holds_and_locks import is_marked
from storage import layout, objects
from storage.config import S3Config
from storage.s3.destination import S3Destination
from tests.support.dice import SOAK
from tests.support.keys import Keys
from tests.support.stores.buckets import config, opened
from tests.support.stores.s3_server import S3Server
from tests.support.stores.stock import START, Stock, backup_id, everything, named, put, sealed
from tests.unit.transfer.test_recover_versions import a_while_ago, hide_everything

_buckets = count(1)


@contextlib.contextmanager
def stocked(server: S3Server) -> Iterator[S3Destination]:
    name = f"attacked{next(_buckets)}"
    server.bucket(name, versioning=True)
    with opened(config(server, name)) as place:
        Stock(place).add(1, {"t": b"one", "u": b"two"})
        yield place


def configured(tmp_path: Path, where: S3Config, keys: Keys) -> Path:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "gold.yaml").write_text(
        'physical: {full: "0 2 * * *"}\ndestinations: {required: [vault]}\n'
    )
    place = {name: str(value) for name, value in where.model_dump(exclude_unset=True).items() if value is not None}
    file = tmp_path / "backupd.yaml"
    file.write_text(
        f"catalog: sqlite:///{tmp_path}/catalog.db\nspool: {tmp_path}/spool\npolicies: {tmp_path}/policies\n"
        "servers: {shop: {socket: /nowhere.sock, policy: gold}}\n"
        f"destinations: {{vault: {json.dumps(place)}, nas: {{type: filesystem, path: {tmp_path}/nas}}}}\n"
        f"encryption: {{gnupg_home: {keys.public_home}, recipients: [{keys.user_id}]}}\n"
    )
    return file


def test_the_command_shows_first_and_brings_back_with_yes(
    s3_server: S3Server, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stocked(s3_server) as place:
        before = everything(place)
        file = str(configured(tmp_path, place._config, keys))
        since = format_time(a_while_ago())
        hide_everything(s3_server, place._config)
        put(place, layout.mark_key("shop", backup_id(1)), b"{}")
        with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog:
            catalog.marks.take("vault", ("shop", backup_id(1)), START, stored=None, confirmed=False)
        assert main(["--config", file, "bring-back", "vault", "--since", since]) == 0
        told = capsys.readouterr().out
        for word in (
            "marker",
            "manifest",
            "object",
            "HIDDEN",
            "OVERWRITTEN",
            backup_id(1),
            "nothing was changed",
            "--yes",
            "marked as deleted only since",
            "1 marks are removed",
        ):
            assert word in told
        assert not S3Destination("vault", place._config).is_initialised()
        assert main(["--config", file, "catalog", "rebuild", "--from", "vault"]) == 1
        assert "backupd recover-versions vault --since TIME" in capsys.readouterr().err
        assert main(["--config", file, "--json", "bring-back", "vault", "--since", since, "--yes"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert set(document["done"]["keys"]) == before
        assert (document["lost"], document["done"]["failed"]) == ({}, {})
        unmarked = {"server": "shop", "backup": backup_id(1)}
        assert document["done"]["unmarked"] == [unmarked]
        assert [one | {"since": ""} for one in document["marks"]] == [unmarked | {"since": ""}]
        assert not is_marked(place, "shop", backup_id(1))
        with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog:
            known = catalog.marks.look("vault", {("shop", backup_id(1)): a_while_ago()}, a_while_ago())
        assert not known["shop", backup_id(1)].ours, "what was known of the mark is forgotten"
        assert is_whole(place, "shop", backup_id(1))
        assert main(["--config", file, "recover-versions", "nas", "--since", since]) == 1
        assert "keeps no versions" in capsys.readouterr().err
        assert main(["--config", file, "bring-back", "vault", "--since", "2999-01-01T00:00:00Z"]) == 2
        assert main(["--config", file, "audit", "--json"]) == 0
        assert [row["action"] for row in json.loads(capsys.readouterr().out)].count("brought-back") == 1


def attacked(server: S3Server, place: S3Destination) -> tuple[str, set[str]]:
    """Everything hidden, and one object overwritten first; since when, and what there was."""
    where, before = place._config, everything(place)
    since = a_while_ago()
    with contextlib.closing(server.client()) as client:
        client.put_object(Bucket=where.bucket, Key=f"{where.prefix}/{layout.intent_key(backup_id(5))}", Body=b"x")
    hide_everything(server, where)
    return format_time(since), before


def run_block(where: S3Config, since: str, base: Path, path: str) -> subprocess.CompletedProcess[str]:
    text = recover_versions_text(where, "vault")
    block = text.split("```sh\n")[1].partition("```")[0]
    script = f'set -eu\nBASE={base}\nproblem() {{ echo "PROBLEM: $*" >&2; }}\n{block}'
    return subprocess.run(
        ["/bin/sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": path,
            "HOME": str(base),
            "SINCE": since,
            "AWS_SHARED_CREDENTIALS_FILE": str(where.credentials_file),
        },
    )


@SOAK
def test_the_lines_of_aws_bring_back_what_was_hidden(s3_server: S3Server, tmp_path: Path) -> None:
    with stocked(s3_server) as place:
        since, before = attacked(s3_server, place)
        done = run_block(place._config, since, tmp_path, os.environ["PATH"])
        assert (done.returncode, done.stderr) == (0, "")
        assert everything(place) == before, "a dead lease stays away"
        assert objects.fetch(place, named(b"one")) == sealed(b"one")
        assert run_block(place._config, "", tmp_path, "/usr/bin:/bin").returncode == 0


_AWS = """#!/bin/sh
echo "$@" >> "$HOME/calls"
case "$*" in
    *Versions*) cat "$HOME/Versions" ;;
    *DeleteMarkers*) cat "$HOME/DeleteMarkers" ;;
    *delete-objects*) cat "$HOME/batch.json" >> "$HOME/deleted" ;;
esac
"""


def test_the_lines_of_aws_choose_what_comes_back(tmp_path: Path) -> None:
    where = S3Config.model_validate({"type": "s3", "bucket": "acme", "prefix": 'it\'s "x"', "endpoint_url": "http://x"})

    def row(key: str, newest: bool, minute: int, version: str, kind: str) -> str:
        return f'it\'s "x"/{key}\t{newest}\t2026-11-21T10:{minute:02d}:00+00:00\t{version}\t{kind}\n'

    (tmp_path / "Versions").write_text(
        row("objects/ab/hidden", False, 1, "v1", "Versions")
        + row("objects/ab/before", False, 1, "v2", "Versions")
        + row("objects/ab/over", True, 31, "v3", "Versions")
        + row("objects/ab/over", False, 1, "v4", "Versions")
        + row("objects/ab/fine", True, 1, "v5", "Versions")
        + row("intents/x.json", False, 1, "v6", "Versions")
        + row("catalog/c", True, 31, "v7", "Versions")
        + row("catalog/c", False, 1, "v8", "Versions")
    )
    (tmp_path / "DeleteMarkers").write_text(
        row("objects/ab/hidden", True, 32, "d1", "DeleteMarkers")
        + row("objects/ab/hidden", False, 31, "d2", "DeleteMarkers")
        + row("objects/ab/before", True, 5, "d3", "DeleteMarkers")
        + row("intents/x.json", True, 31, "d4", "DeleteMarkers")
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/aws").write_text(_AWS)
    (tmp_path / "bin/aws").chmod(0o755)
    done = run_block(where, "2026-11-21T10:30:00Z", tmp_path, f"{tmp_path}/bin:/usr/bin:/bin")
    assert (done.returncode, done.stderr) == (0, "")
    assert [(one["Key"], one["VersionId"]) for one in json.loads((tmp_path / "deleted").read_text())["Objects"]] == [
        ('it\'s "x"/objects/ab/hidden', "d1"),
        ('it\'s "x"/objects/ab/hidden', "d2"),
    ]
    copied = [line for line in (tmp_path / "calls").read_text().splitlines() if "copy-object" in line]
    assert copied == [
        (
            '--endpoint-url http://x s3api copy-object --bucket acme --key it\'s "x"/objects/ab/over '
            "--copy-source acme/it%27s%20%22x%22/objects/ab/over?versionId=v4"
        )
    ]
    quiet = run_block(where, "", tmp_path, "/nowhere")
    assert (quiet.returncode, quiet.stderr) == (0, "")
