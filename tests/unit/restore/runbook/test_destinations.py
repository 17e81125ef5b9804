"""Runbooks of copies in a bucket and on another host: their blocks, executed word for word by aws, sftp and sh."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from restore.runbook.backup_runbook import render_logical_runbook, render_runbook
from restore.runbook.shared_steps import render_destinations, render_unpack
from storage import layout
from storage.config import DestinationConfig, FilesystemConfig, S3Config, SftpConfig
from storage.filesystem import FilesystemDestination
from tests.support.dice import SOAK
from tests.support.keys import Keys
from tests.support.restores.builder import STARTED, Builder, files_below, gpg_seal
from tests.support.restores.taken import Taken
from tests.support.stores import s3_server as s3server
from tests.support.stores import ssh_server as sshserver
from tests.support.stores.moto_server import MotoServer
from tests.support.stores.s3_server import S3Server
from tests.support.stores.ssh_server import SshServer, ssh_server
from tests.unit.restore.runbook.test_whole import BARE, check_restored, commands

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["ssh_server"]
AWS = Path("/usr/bin/aws")
needs_aws = pytest.mark.skipif(not AWS.exists(), reason="no aws: scripts/setup --test installs it")
needs_s3 = pytest.mark.skipif(bool(s3server.why_not()), reason=s3server.why_not())
needs_ssh = pytest.mark.skipif(bool(sshserver.why_not()), reason=sshserver.why_not())
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="the runbook is for root")


def blocks(runbook: str) -> list[str]:
    """Every block that fetches, word for word."""
    return re.findall(r"^```shell\n(.*?)^```$", runbook, re.MULTILINE | re.DOTALL)


def run(script: str, repository: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", script],
        env=BARE | {"REPOSITORY": str(repository)} | more,
        cwd="/",
        text=True,
        check=False,
        capture_output=True,
    )


def book(taken: Taken, name: str, place: DestinationConfig) -> str:
    return render_runbook(taken.header, taken.body, destinations=["local", name], configs={name: place})


def trimmed(taken: Taken, folder: Path) -> Taken:
    """Its repository as it lies where there are no trees, with three logs and an object that nobody needs."""
    copy = taken.copy(folder)
    subprocess.run(
        ["rm", "-rf", str(folder / layout.SERVERS / "shop" / taken.header.backup_id / layout.FILES)], check=True
    )
    for number in range(3):
        segment = f"{number:010d}-000000000000-000000000009"
        part = folder / f"binlogs/shop/{taken.header.backup_id}/{segment}/part-00000.zst.gpg"
        part.parent.mkdir(parents=True)
        part.write_bytes(b"log")
    stray = folder / layout.object_key("ab" * 32 + "-" + "01" * 8)
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.write_bytes(b"somebody else's")
    return copy


def needed(taken: Taken) -> Mapping[str, object]:
    """What the restore needs of its repository, and the logs."""
    names = {layout.object_key(item.name) for item in taken.header.objects}
    return {
        path: digest
        for path, digest in files_below(taken.folder).items()
        if path in names or path.startswith(("servers/", "binlogs/"))
    }


def fetched(repository: Path) -> Mapping[str, object]:
    return {path: digest for path, digest in files_below(repository).items() if "/" in path}


def aws(server: S3Server | MotoServer, *arguments: str) -> str:
    environment = BARE | {"AWS_SHARED_CREDENTIALS_FILE": str(server.credentials_file)}
    return subprocess.run(
        [str(AWS), "--endpoint-url", server.endpoint, "--region", s3server.REGION, *arguments],
        env=environment,
        check=True,
        text=True,
        capture_output=True,
    ).stdout


@SOAK
@needs_aws
@needs_s3
@as_root
def test_from_a_bucket_alone_its_runbook_word_for_word_gives_the_same_data(
    taken: Taken, keys: Keys, s3_server: S3Server, short_tmp: Path
) -> None:
    place = S3Config.model_validate(s3_server.bucket("by-hand") | {"prefix": "our backups"})
    there = trimmed(taken, short_tmp / "there")
    path = there.folder / layout.runbook_key("shop", taken.header.backup_id)
    path.write_text(book(taken, "offsite", place))
    aws(s3_server, "s3", "cp", "--quiet", "--recursive", str(there.folder), "s3://by-hand/our backups/")
    stored = aws(s3_server, "s3", "cp", f"s3://by-hand/our backups/{path.relative_to(there.folder)}", "-")
    repository = short_tmp / "it's here"
    done = run("".join(blocks(stored)), repository, AWS_SHARED_CREDENTIALS_FILE=str(s3_server.credentials_file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert fetched(repository) == needed(there)
    done = run(commands(stored), repository, DATADIR=str(short_tmp / "mysql"), GNUPGHOME=str(keys.secret_home))
    assert done.returncode == 0, done.stdout + done.stderr
    check_restored(short_tmp / "mysql", taken)


@needs_ssh
def test_from_another_host_its_runbook_word_for_word_fetches_what_is_needed(
    taken: Taken, keys: Keys, ssh_server: SshServer, short_tmp: Path
) -> None:
    folder = short_tmp / 'it\'s "there" $HOME \\a [x]* ß'
    place = ssh_server.config(folder)
    there = trimmed(taken, folder)
    path = there.folder / layout.runbook_key("shop", taken.header.backup_id)
    path.write_text(book(taken, "vault", place))
    repository = short_tmp / "re pository"
    more = {"SSH_KEY": str(ssh_server.key_file), "SSH_OPTIONS": f"-o UserKnownHostsFile={ssh_server.known_hosts}"}
    for _ in range(2):  # what was interrupted may be repeated
        done = run("".join(blocks(path.read_text())), repository, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        assert fetched(repository) == needed(there)
        next(repository.glob("objects/*/*")).unlink()
    (there.folder / layout.object_key(taken.header.objects[0].name)).unlink()
    assert run("".join(blocks(path.read_text())), short_tmp / "other", **more).returncode != 0


def upload(client: S3Client, folder: Path, bucket: str, prefix: str = "", **classes: str) -> None:
    """Every file, in the storage class that is given for the first folder of its key."""
    for path, content in files_below(folder).items():
        kind = classes.get(path.partition("/")[0], "STANDARD")
        client.put_object(Bucket=bucket, Key=prefix + path, Body=content, StorageClass=kind)  # type: ignore[arg-type]  # one of the names that it knows


def small(keys: Keys, folder: Path, place: DestinationConfig, files: Mapping[str, bytes]) -> Path:
    """A repository with a backup of ``files``, its runbook, and a binary log; gives the runbook's path."""
    builder = Builder(keys)
    entries = builder.entries(files)
    header, body = builder.manifest(entries)
    local = FilesystemDestination("local", folder)
    local.initialise(STARTED)
    runbook = render_runbook(header, body, destinations=["away"], configs={"away": place})
    builder.put(
        local,
        header,
        {
            layout.RUNBOOK: runbook.encode(),
            layout.UNPACK: gpg_seal(keys, render_unpack(header.backup_id, entries, header.objects)),
        },
    )
    part = folder / f"binlogs/shop/{header.backup_id}/0000000001-000000000000-000000000009/part-00000.zst.gpg"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"log")
    return folder / layout.runbook_key("shop", header.backup_id)


def unpacked(runbook: str, repository: Path, keys: Keys, work: Path) -> Mapping[str, bytes]:
    """What the runbook's step that unpacks makes of the repository."""
    work.mkdir()
    (step,) = (
        step for step in re.findall(r"^```sh\n(.*?)^```$", runbook, re.MULTILINE | re.DOTALL) if layout.UNPACK in step
    )
    checked = work / "checked"
    for one in repository.glob("servers/shop/*"):
        shutil.copytree(one, checked / one.name)  # as the step before leaves it
    done = run("set -eu\n" + step, repository, WORK=str(work), GNUPGHOME=str(keys.secret_home), CHECKED=str(checked))
    assert done.returncode == 0, done.stdout + done.stderr
    return files_below(work / "data")


FILES = {"ibdata1": bytes(100_000), "shop/orders.ibd": b"orders" * 200, "shop/db.opt": b"tiny"}


@needs_aws
@needs_s3
def test_from_a_bucket_its_runbook_word_for_word_gives_every_file(
    keys: Keys,
    s3_server: S3Server,
    short_tmp: Path,
) -> None:
    place = S3Config.model_validate(s3_server.bucket("by-hand-small") | {"prefix": "our backups"})
    path = small(keys, short_tmp / "there", place, FILES)
    with contextlib.closing(s3_server.client()) as client:
        upload(client, short_tmp / "there", "by-hand-small", "our backups/")
        key = f"our backups/{path.relative_to(short_tmp / 'there')}"
        stored = client.get_object(Bucket="by-hand-small", Key=key)["Body"].read().decode()
    repository = short_tmp / "it's here"
    done = run(
        "".join(blocks(stored)), repository, AWS_SHARED_CREDENTIALS_FILE=str(s3_server.credentials_file), SMALL="1"
    )  # folder by folder, as where there are many objects
    assert done.returncode == 0, done.stdout + done.stderr
    assert fetched(repository) == {
        name: content for name, content in files_below(short_tmp / "there").items() if "/" in name
    }
    assert unpacked(stored, repository, keys, short_tmp / "work") == FILES


@needs_aws
def test_what_lies_in_an_archive_class_is_thawed_first(keys: Keys, moto_server: MotoServer, short_tmp: Path) -> None:
    place = S3Config.model_validate(
        moto_server.bucket("frozen") | {"storage_class": "GLACIER", "binlog_storage_class": "DEEP_ARCHIVE"}
    )
    files = {"ibdata1": bytes(1000)}
    stored = small(keys, short_tmp / "there", place, files).read_text()
    with contextlib.closing(moto_server.client()) as client:
        upload(client, short_tmp / "there", "frozen", objects="GLACIER", binlogs="DEEP_ARCHIVE")
    more = {"AWS_SHARED_CREDENTIALS_FILE": str(moto_server.credentials_file)}
    lists, thaw, look, get, log_keys, log_thaw, log_look, log_get = blocks(stored)
    repository = short_tmp / "repository"
    done = run(lists + look + thaw + look + get, repository, TIER="Expedited", **more)
    assert (done.returncode, done.stdout) == (0, "1\n0\n"), done.stderr
    assert unpacked(stored, repository, keys, short_tmp / "work") == files
    done = run(
        f"set -eu\nFROM=s3://frozen\ncd '{repository}'\n" + log_keys + log_thaw + log_look + log_get,
        repository,
        TIER="Bulk",
        AWS_CONFIG_FILE=str(repository / "aws-config"),
        AWS_DEFAULT_REGION=s3server.REGION,
        **more,
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert [path.read_bytes() for path in (repository / "binlogs").rglob("part-*")] == [b"log"]


def test_each_place_is_described_without_a_secret(taken: Taken) -> None:
    places: dict[str, DestinationConfig] = {
        "local": FilesystemConfig.model_validate({"type": "filesystem", "path": "/srv/backups"}),
        "cloud": S3Config.model_validate(
            {
                "type": "s3",
                "bucket": "acme-backups",
                "prefix": "prod",
                "region": "eu-central-1",
                "addressing": "path",
                "endpoint_url": "https://s3.example.com",
                "credentials_file": "/etc/backupd/s3-credentials",
                "profile": "backups",
                "ca_file": "/etc/backupd/ca.pem",
                "storage_class": "DEEP_ARCHIVE",
            }
        ),
        "vault": SftpConfig.model_validate(
            {
                "type": "sftp",
                "host": "vault.example.com",
                "user": "backupd",
                "path": "/srv/b",
                "port": 2222,
                "key_file": "/etc/backupd/sftp-key",
                "known_hosts": "/etc/backupd/known_hosts",
            }
        ),
    }
    for text in (
        render_runbook(taken.header, taken.body, destinations=list(places), configs=places),
        render_logical_runbook(taken.header, taken.body, destinations=list(places), configs=places),
    ):
        for word in (
            "`acme-backups`",
            "`prod/`",
            "`eu-central-1`",
            "`https://s3.example.com`",
            "`backups`",
            "AWS_CA_BUNDLE",
            "`DEEP_ARCHIVE`",
            "48 hours",
            "`vault.example.com`",
            "port 2222",
            "`/srv/b`",
            "A copy in a folder (local)",
        ):
            assert word in text, word
        assert "/etc/backupd" not in text
        assert "@" not in re.sub(r"\$@|backupd@vault|ops@example.com|backupd_private@localhost", "", text)
        assert text.index("## Where the files are") < text.index("## 1. ")
    local = {"local": places["local"]}
    assert render_destinations("shop", ["x"], local, stored=1) == ""
    assert "Where the files are" not in render_runbook(taken.header, taken.body, destinations=["local"], configs=local)


def test_an_increment_s_places_fetch_the_whole_chain(taken: Taken) -> None:
    place = S3Config.model_validate({"type": "s3", "bucket": "acme"})
    chain = ["20261121T020000Z-7f3a9c01", "20261122T020000Z-7f3a9c02"]
    text = render_destinations("shop", chain, {"cloud": place}, stored=1 << 30)
    assert text.count("for backup in 20261121T020000Z-7f3a9c01 20261122T020000Z-7f3a9c02; do") == 2
    assert "at most 1.0 GiB" in text
    assert "Amazon S3" in text
    assert "restore-object" not in text
