"""Copies of catalog and configuration at every destination, with what to do when nothing else is left."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.metacopies import catalog_copies as bootstrap
from backupd.app.metacopies.catalog_copies import (
    after_job,
    configuration_tar,
    own_copies,
    read_copies,
    write_copies,
)
from backupd.app.metacopies.copy_check import HERE, of_today
from backupd.app.metacopies.recover_document import mend_marker, recover_text, texts_problems
from backupd.catalog.session import open_catalog
from backupd.model.errors import DestinationError, LockedError, RefusedError
from backupd.model.event import Event, Severity
from backupd.transfer.records import proofs as proofdoc
from storage import layout
from storage.config import FilesystemConfig, S3Config, SftpConfig
from storage.destination import Destination
from tests.support.catalog.samples import backup, proof, witness
from tests.support.keys import Keys
from tests.support.logs.log_store import DESTINATIONS, SERVER, wired
from tests.support.service.house import Clock, at
from tests.support.stores.stock import Stock, backup_id

NOON = at("2026-11-21T12:00Z")
HOUR = timedelta(hours=1)


@pytest.fixture
def wiring(tmp_path: Path, keys: Keys) -> Iterator[Wiring]:
    with wired(tmp_path, keys) as found:
        yield replace(found, clock=Clock(NOON))


def passes(wiring: Wiring, time: timedelta) -> None:
    assert isinstance(wiring.clock, Clock)
    wiring.clock.sleep(time)


def names(destination: Destination, folder: str) -> list[str]:
    return [info.key for info in own_copies(destination, folder)]


def opened(wiring: Wiring, place: str, key: str) -> bytes:
    with wiring.destination(place).get(key) as stream:
        return wiring.unsealer().unseal(stream.read(), limit=1 << 30)


def test_every_destination_gets_the_catalog_the_configuration_and_what_to_do(wiring: Wiring, tmp_path: Path) -> None:
    wiring.catalog.backups.add(backup(server=SERVER))
    Stock(wiring.destination("local"), server=SERVER).add(1, {"a": b"a"})
    told = write_copies(wiring)
    assert [
        (one.destination, bool(one.catalog), bool(one.configuration), one.recover, one.problem) for one in told
    ] == [(place, True, True, True, "") for place in DESTINATIONS]
    for one in told:
        file = tmp_path / f"{one.destination}.db"
        file.write_bytes(opened(wiring, one.destination, one.catalog))
        with open_catalog(f"sqlite:///{file}") as copy:
            assert [record.id for record in copy.backups.every()] == [backup().id]
        with tarfile.open(fileobj=io.BytesIO(opened(wiring, one.destination, one.configuration))) as tar:
            assert tar.getnames() == ["backupd.yaml", "policies/gold.yaml", "public-keys.asc"]
            content = tar.extractfile("backupd.yaml")
            assert content is not None
            assert content.read() == wiring.settings.file.read_bytes()
    text = (tmp_path / "local" / "RECOVER.md").read_text()
    assert layout.runbook_key(SERVER, backup_id(1)) in text
    assert wiring.recipients()[1][0] in text
    assert str(tmp_path) not in text, "nothing of the lost host"
    assert [path.name for path in wiring.settings.spool.iterdir() if path.name.startswith("copies-")] == []


def test_the_copy_of_the_configuration_holds_the_files_of_servers(wiring: Wiring) -> None:
    folder = wiring.settings.file.parent / "servers.d"
    folder.mkdir()
    (folder / "berlin.yaml").write_text("db7: {policy: gold}\n")
    (folder / "notes.txt").write_text("not read\n")
    there = replace(wiring, settings=load_settings(wiring.settings.file))
    for one in write_copies(there):
        with tarfile.open(fileobj=io.BytesIO(opened(there, one.destination, one.configuration))) as tar:
            assert tar.getnames() == ["backupd.yaml", "servers.d/berlin.yaml", "policies/gold.yaml", "public-keys.asc"]
            content = tar.extractfile("servers.d/berlin.yaml")
            assert content is not None
            assert content.read() == b"db7: {policy: gold}\n"
            anew = wiring.settings.spool / one.destination
            tar.extractall(anew, filter="data")
        assert list(load_settings(anew / "backupd.yaml").servers) == [SERVER, "db7"], "on another host"
    (folder / "berlin.yaml").write_text("db8: {policy: gold}\n")
    assert [bool(one.configuration) for one in write_copies(there)] == [True] * 2, "as soon as one of them changes"
    (folder / "berlin.yaml").unlink()
    (folder / "notes.txt").unlink()
    folder.rmdir()
    with pytest.raises(RefusedError, match=r"servers\.d cannot be copied"):
        configuration_tar(there.settings, there.recipients()[1])


def test_recover_says_which_servers_a_copy_of_the_configuration_names_wherever_they_are_written(tmp_path: Path) -> None:
    newest = dict.fromkeys(("db1", "db2", "db3"), backup_id(1))
    folder = FilesystemConfig.model_validate({"type": "filesystem", "path": tmp_path})
    text = recover_text("vault", folder, newest, recipients=["A" * 40])
    (loop,) = re.findall(r"(    for server in .*?\n    done\n)", text, re.DOTALL)
    copy = tmp_path / "old" / "0123"
    copy.mkdir(parents=True)
    (copy / "backupd.yaml").write_text("servers: {db1: {policy: gold}}\n")

    def named() -> str:
        script = f"set -eu\ninstallation=0123\n{loop}"
        environment = {"BASE": str(tmp_path), "PATH": os.defpath}
        return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env=environment).stdout

    assert named() == "- server db1\n", "a copy of an earlier version has no folder of servers"
    (copy / "servers.d").mkdir()
    (copy / "servers.d" / "a.yaml").write_text("db2: {policy: gold}\n")
    assert named() == "- server db1\n- server db2\n"


def test_the_catalog_is_copied_at_most_once_an_hour_and_what_has_not_changed_never(wiring: Wiring) -> None:
    write_copies(wiring)
    there = wiring.destination("local")
    passes(wiring, HOUR / 2)
    wiring.catalog.backups.add(backup())
    assert [(one.catalog, one.configuration) for one in write_copies(wiring)] == [("", "")] * 2
    assert [bool(one.catalog) for one in write_copies(wiring, now=True)] == [True] * 2, "asked for by hand"
    passes(wiring, HOUR)
    assert [(one.catalog, one.configuration) for one in write_copies(wiring)] == [("", "")] * 2, "nothing is new"
    wiring.settings.file.write_text(wiring.settings.file.read_text() + "# a note\n")
    assert [(one.catalog, bool(one.configuration)) for one in write_copies(wiring)] == [("", True)] * 2
    for info in own_copies(there, layout.CATALOGS):
        there.delete(info.key)
    assert [bool(one.catalog) for one in write_copies(wiring)] == [True, False], "somebody took them away there"


def test_each_installation_keeps_its_newest_copies_and_touches_no_others(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "KEPT", 3)
    there = wiring.destination("local")
    strangers = [layout.catalog_key(NOON - timedelta(days=days), "0123456789ab") for days in (400, 300, 200, 100)]
    for key in strangers:
        there.put(key, io.BytesIO(b"theirs"))
    made = []
    for number in range(5):
        wiring.catalog.backups.add(backup(number))
        made.append(write_copies(wiring)[0].catalog)
        passes(wiring, HOUR)
    assert names(there, layout.CATALOGS) == [*strangers, *made[-3:]]
    assert len(names(there, layout.CONFIGURATIONS)) == 1


def test_a_catalog_made_after_a_loss_leaves_the_copies_of_the_lost_one_alone_until_it_has_enough_of_its_own(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "KEPT", 5)
    there = wiring.destination("local")

    def copies(of: Wiring, count: int) -> list[str]:
        made = []
        for number in range(count):
            passes(wiring, HOUR)
            of.catalog.events.add(Event(NOON, "something", Severity.INFO, f"{number} happened"))
            made.append(write_copies(of)[0].catalog)
        return made

    before = copies(wiring, 5)
    with open_catalog(f"sqlite:///{wiring.settings.spool}/fresh.db") as fresh:
        new = replace(wiring, catalog=fresh)
        assert len({fresh.identity(), fresh.identity(), wiring.catalog.identity()}) == 2
        after = copies(new, 4)
        assert names(there, layout.CATALOGS) == [*before, *after]
        after += copies(new, 2)
        assert names(there, layout.CATALOGS) == [*before[-3:], *after[-5:]]


def test_what_a_rule_of_the_place_keeps_is_left_there(wiring: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "KEPT", 1)

    def locked(_key: str) -> None:
        raise LockedError("locked until next year")

    for place in DESTINATIONS:
        monkeypatch.setattr(wiring.destination(place), "delete", locked)
    for number in range(3):
        wiring.catalog.backups.add(backup(number))
        assert [one.problem for one in write_copies(wiring)] == ["", ""]
        passes(wiring, HOUR)
    assert len(names(wiring.destination("local"), layout.CATALOGS)) == 3


def test_a_destination_that_fails_keeps_nobody_from_the_others_and_is_told_once(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_key: str, _stream: object) -> None:
        raise DestinationError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(wiring.destination("local"), "put", broken)
        after_job(wiring)
        after_job(wiring)
    assert names(wiring.destination("local"), layout.CATALOGS) == []
    assert len(names(wiring.destination("offsite"), layout.CATALOGS)) == 1
    after_job(wiring)
    assert len(names(wiring.destination("local"), layout.CATALOGS)) == 1
    assert [(event.kind, event.subject) for event in wiring.catalog.events.list()][::-1] == [
        ("copies-failed", "local"),
        ("copies-stored", "local"),
    ]


def test_a_job_does_not_fail_because_nothing_can_be_sealed(wiring: Wiring, tmp_path: Path) -> None:
    file = wiring.settings.file
    file.write_text(file.read_text().replace("recipients: [", "recipients: [nobody@example.com, "))
    after_job(replace(wiring, settings=load_settings(file)))
    assert not (tmp_path / "local" / "RECOVER.md").exists()


def test_proofs_and_witnesses_are_kept_beside_the_backups_and_go_when_no_backup_is_as_old(wiring: Wiring) -> None:
    there = wiring.destination("offsite")
    proved = replace(proof(), id="20261122T120100Z-0000000a", server=SERVER)
    wiring.catalog.proofs.add(proved)
    seen = replace(witness(), server=SERVER)
    for witness_id in ("20261120T000000Z-0000000b", "20261121T120500Z-0000000c"):
        wiring.catalog.witnesses.add(witness_id, seen, backup_id=backup().id)
    assert [one.proofs for one in write_copies(wiring)] == [3, 3]
    assert [one.proofs for one in write_copies(wiring)] == [0, 0]
    wiring.catalog.witnesses.forget(backup().id)
    passes(wiring, timedelta(days=401))
    write_copies(wiring)
    assert len(list(proofdoc.listed(there))) == 3, "without any backup there nothing says what is old"
    Stock(there, server=SERVER).add(1, {"a": b"a"})
    write_copies(wiring)
    assert [proof_id for _server, proof_id in proofdoc.listed(there)] == ["20261121T120500Z-0000000c", proved.id]


def test_a_catalog_that_does_not_know_a_proof_is_no_reason_to_take_it_away(wiring: Wiring) -> None:
    wiring.catalog.proofs.add(replace(proof(), id="20261121T000000Z-0000000a", server=SERVER))
    Stock(wiring.destination("local"), server=SERVER).add(1, {"a": b"a"})
    write_copies(wiring)
    with open_catalog(f"sqlite:///{wiring.settings.spool}/fresh.db") as fresh:
        fresh.backups.add(replace(backup(), server=SERVER, started_at=NOON))
        passes(wiring, timedelta(days=2))
        write_copies(replace(wiring, catalog=fresh))
        passes(wiring, timedelta(days=500))
        write_copies(replace(wiring, catalog=fresh))
    assert len(list(proofdoc.listed(wiring.destination("local")))) == 0, "of a backup that is gone there, and long ago"
    assert len(list(proofdoc.listed(wiring.destination("offsite")))) == 1, "no backup there says anything"


def test_the_text_follows_each_backup_and_a_look_finds_it_stale_altered_or_missing(
    wiring: Wiring, tmp_path: Path
) -> None:
    text = tmp_path / "offsite" / "RECOVER.md"
    after_job(wiring)
    Stock(wiring.destination("offsite"), server=SERVER).add(1, {"a": b"a"})
    passes(wiring, HOUR / 60)
    after_job(wiring)
    assert layout.runbook_key(SERVER, backup_id(1)) in text.read_text()
    assert read_copies(wiring, None, whole=False) == ()
    right = text.read_bytes()
    for wrong in (b"", bytes(len(right)), right[:-1], right + b"x", right.replace(b"latest", b"newest", 1), None):
        if wrong is None:
            text.unlink()
        else:
            text.write_bytes(wrong)
        assert set(texts_problems(wiring, wiring.destination("offsite"))) == {layout.RECOVER}
        (damage,) = read_copies(wiring, None, whole=False)
        assert (damage.destination, damage.key, damage.repaired_from) == ("offsite", layout.RECOVER, HERE)
        assert text.read_bytes() == right
    note = wiring.settings.spool / "copies.json"
    noted = json.loads(note.read_text())
    note.write_text(json.dumps({name: one for name, one in noted.items() if not name.endswith(layout.RECOVER)}))
    text.write_bytes(right.replace(b"It holds no secret", b"It held no secret"))
    (damage,) = read_copies(wiring, None, whole=False)
    assert (damage.aged, "no record of the write exists (an earlier version?)" in damage.problem) == (True, True)
    assert text.read_bytes() == right
    Stock(wiring.destination("offsite"), server="another").add(2, {"a": b"a"})
    (damage,) = read_copies(wiring, None)
    assert damage.aged
    assert "stale" in damage.problem
    assert layout.runbook_key("another", backup_id(2)) in text.read_text()
    assert '"another"' in text.read_text(), "the configuration for the recovery names it, too"


def test_the_marker_of_a_place_is_known_again_and_put_back(wiring: Wiring, tmp_path: Path) -> None:
    marker, there = tmp_path / "local" / "repository.json", wiring.destination("local")
    right = marker.read_bytes()
    altered = right.replace(json.loads(right)["id"].encode(), b"0" * 32)
    flipped = [bytes([*right[:place], right[place] ^ 4, *right[place + 1 :]]) for place in range(len(right))]
    after_job(wiring)
    assert texts_problems(wiring, there) == {}
    for wrong in (b"", bytes(len(right)), right + b" ", right + b"\n", altered, *flipped[::7]):
        marker.write_bytes(wrong)
        after_job(wiring)
        assert set(texts_problems(wiring, there)) == {layout.REPOSITORY}, wrong
    assert mend_marker(wiring, there)
    assert marker.read_bytes() == right
    later = {**json.loads(right), "created_at": "2027-01-01T00:00:00Z", "id": "1" * 32}
    marker.write_text(json.dumps(later, sort_keys=True, indent=2) + "\n")
    assert texts_problems(wiring, there) == {}, "a place that was made anew is no damage"


def flip(wiring: Wiring, place: str, key: str) -> bytes:
    """One bit of what lies there; what it was before."""
    there = wiring.destination(place)
    with there.get(key) as stream:
        before = stream.read()
    there.put(key, io.BytesIO(bytes([*before[:50], before[50] ^ 1, *before[51:]])))
    return before


def kinds(wiring: Wiring) -> list[tuple[str, str]]:
    return [(event.kind, event.subject) for event in reversed(wiring.catalog.events.list())]


def test_copies_and_proofs_that_rot_are_replaced_before_they_go_and_that_is_told(wiring: Wiring) -> None:
    wiring.catalog.proofs.add(replace(proof(), id="20261121T000000Z-0000000a", server=SERVER))
    local = write_copies(wiring)[0]
    assert read_copies(wiring, None) == (), "all of it is as it was put there"
    (owner,) = proofdoc.listed(wiring.destination("local"))
    whole = flip(wiring, "local", local.configuration)
    flip(wiring, "local", layout.proof_key(*owner))
    for place in DESTINATIONS:  # nobody has it any more
        flip(wiring, place, local.catalog)
    assert not write_copies(wiring)[0].configuration, "a digest of what it was made of tells nothing"
    passes(wiring, HOUR)
    found = {(one.destination, one.key): one for one in read_copies(wiring, SERVER)}
    assert len(found) == 4
    assert all("SHA-256 differs" in one.problem for one in found.values())
    assert {key[1].partition("/")[0]: one.repaired_from for key, one in found.items() if key[0] == "local"} == {
        "configuration": "offsite",
        "proofs": HERE,
        "catalog": HERE,
    }
    with wiring.destination("local").get(local.configuration) as stream:
        assert stream.read() == whole
    assert proofdoc.load(wiring.destination("local"), *owner, wiring.unsealer()) is not None
    for place in DESTINATIONS:
        (key,) = names(wiring.destination(place), layout.CATALOGS)
        assert key != local.catalog
        assert opened(wiring, place, key).startswith(b"SQLite format 3")
    assert kinds(wiring) == [("rot-repaired", place) for place in DESTINATIONS]
    assert read_copies(wiring, None) == ()


def test_housekeeping_looks_at_the_newest_copies_each_day_and_at_all_of_them_in_four_weeks(wiring: Wiring) -> None:
    first = write_copies(wiring)[0].configuration
    passes(wiring, 24 * HOUR)
    second = write_copies(wiring)[0].configuration
    assert second, "of the configuration there are two, though nothing has changed"
    flip(wiring, "local", second)
    after_job(wiring, turn=lambda _key: False)
    assert second in wiring.catalog.events.list()[0].detail
    flip(wiring, "local", first)
    turns = [of_today(wiring.clock() + day * 24 * HOUR) for day in range(28)]
    (turn,) = [turn for turn in turns if turn(first)]
    after_job(wiring, turn=lambda key: turn(key) and key != first)
    after_job(wiring, turn=turn)
    assert kinds(wiring) == [("rot-repaired", "local")] * 2
    assert first in wiring.catalog.events.list()[0].detail


def test_the_only_copy_of_a_lost_catalog_is_not_taken_away_because_it_is_damaged(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old, _offsite) = write_copies(wiring)
    with open_catalog(f"sqlite:///{wiring.settings.spool}/fresh.db") as fresh:
        anew = replace(wiring, catalog=fresh)
        passes(wiring, HOUR)
        write_copies(anew)
        for place in DESTINATIONS:
            flip(wiring, place, old.catalog)
        for _time in range(2):
            assert {(one.key, one.repaired_from) for one in read_copies(anew, None)} == {(old.catalog, "")}
        assert kinds(anew) == [("copies-damaged", place) for place in DESTINATIONS]
        for place in DESTINATIONS:
            assert old.catalog in names(wiring.destination(place), layout.CATALOGS)
            wiring.destination(place).delete(old.catalog)
        after_job(anew, turn=lambda _key: False)
        assert kinds(anew)[2:] == [("copies-sound", place) for place in DESTINATIONS]


def test_what_somebody_puts_under_our_name_pushes_no_copy_out(wiring: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "KEPT", 3)
    there = wiring.destination("local")
    made = [write_copies(wiring)[0].catalog]
    owner = layout.copy_of(made[0])
    assert owner is not None
    for days in range(1, 6):
        there.put(layout.catalog_key(NOON + timedelta(days=days), owner[1]), io.BytesIO(b"garbage"))
    for number in range(2):
        passes(wiring, HOUR)
        wiring.catalog.backups.add(backup(number))
        made.append(write_copies(wiring)[0].catalog)
    assert set(made) <= set(names(there, layout.CATALOGS))


def test_the_steps_of_the_text_go_on_after_copies_that_nobody_can_open_and_a_rebuild_with_problems(
    wiring: Wiring, tmp_path: Path, keys: Keys
) -> None:
    Stock(wiring.destination("local"), server=SERVER).add(1, {"a": b"a"})
    write_copies(wiring)
    there = wiring.destination("local")
    (ours,) = names(there, layout.CONFIGURATIONS)
    ((_at, installation),) = [copy for copy in [layout.copy_of(ours)] if copy is not None]
    garbage = [layout.configuration_key(NOON + timedelta(days=900), maker) for maker in (installation, "a" * 12)]
    for key in garbage:
        there.put(key, io.BytesIO(b"garbage"))
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "backupd").write_text('#!/bin/sh\necho "$@"\nexit 1\n')
    (programs / "backupd").chmod(0o755)
    text = (tmp_path / "local" / "RECOVER.md").read_text()
    blocks = [part.partition("```")[0] for part in text.split("```sh\n")[1:]]
    base = tmp_path / "recovery"
    done = subprocess.run(
        ["sh", "-c", "\n".join(blocks[:4])],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": f"{programs}:/usr/bin:/bin",
            "BASE": str(base),
            "GNUPGHOME": str(keys.secret_home),
            "DATADIR": "/d",
            "REPOSITORY": str(tmp_path / "local"),
        },
    )
    assert done.returncode == 0, done.stderr
    for key in garbage:
        assert f"PROBLEM: {key} cannot be opened" in done.stderr
    assert (base / "old" / installation / "backupd.yaml").read_text() == wiring.settings.file.read_text()
    assert [path.name for path in (base / "old").iterdir()] == [installation]
    assert f"- server {SERVER}\n" in done.stdout
    assert "PROBLEM: not all of it could be taken in" in done.stderr
    assert f"timeline {SERVER}\n" in done.stdout


@pytest.mark.parametrize(
    "config",
    [
        S3Config.model_validate(
            {
                "type": "s3",
                "bucket": "acme-backups",
                "prefix": "it's $HOME",
                "region": "eu-central-1",
                "lock_days": 3,
                "object_lock": "governance",
                "endpoint_url": "http://127.0.0.1:9/",
                "credentials_file": "/etc/secret",
                "profile": "backupd",
                "addressing": "path",
            }
        ),
        SftpConfig.model_validate(
            {
                "type": "sftp",
                "host": "vault",
                "user": "backupd",
                "path": "/srv/`date`",
                "key_file": "/etc/secret",
                "known_hosts": "/etc/secret",
            }
        ),
    ],
)
def test_the_text_names_the_place_without_secrets_and_every_shell_and_yaml_part_is_well_formed(
    config: S3Config | SftpConfig, tmp_path: Path
) -> None:
    text = recover_text("vault", config, {"db1": backup_id(1), "db2": backup_id(2)}, recipients=["A" * 40, "B" * 40])
    assert "/etc/secret" not in text
    assert "A" * 40 in text
    script = "\n".join(part.partition("```")[0] for part in text.split("```sh\n")[1:])
    begin, end = script.index('cat > "$BASE/backupd.yaml"'), script.index("export BACKUPD_CONFIG")
    made = f"set -eu\nBASE={tmp_path} GNUPGHOME=/keys OWNER=mysql SFTP_KEY=/k KNOWN_HOSTS=/h PASSPHRASE_FILE=/p\n"
    (tmp_path / "policies").mkdir()
    subprocess.run(["sh", "-c", made + script[begin:end]], check=True)
    subprocess.run(["sh", "-n", "-c", script], check=True)
    settings = load_settings(tmp_path / "backupd.yaml")
    found = settings.destination("vault")
    for field in ("bucket", "prefix", "region", "endpoint_url", "host", "user", "path", "object_lock"):
        assert getattr(found, field, None) == getattr(config, field, None)
    assert settings.needs_restore().passphrase_file == Path("/p")
    assert set(settings.servers) == {"db1", "db2"}
