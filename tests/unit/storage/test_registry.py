"""Every type of destination that a configuration can name is opened, no faster than it says."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.model.errors import DestinationError
from storage.config import DestinationConfig, FilesystemConfig, S3Config, SftpConfig
from storage.destination import Capability, as_archive, as_tree
from storage.registry import open_destination
from tests.contract.destination import get, put
from tests.support.stores.buckets import OBJECT, config
from tests.support.stores.s3_server import S3Server

_HEAVY = """
import sys
import storage.registry
print(*(name for name in ("boto3", "botocore", "paramiko") if name in sys.modules))
"""


def every_type(tmp_path: Path) -> dict[str, DestinationConfig]:
    return {
        "local": FilesystemConfig.model_validate({"type": "filesystem", "path": tmp_path / "backups"}),
        "offsite": S3Config.model_validate({"type": "s3", "bucket": "acme-backups", "storage_class": "DEEP_ARCHIVE"}),
        "vault": SftpConfig.model_validate(
            {
                "type": "sftp",
                "host": "vault.example.com",
                "user": "backupd",
                "path": "/srv/backups",
                "key_file": tmp_path / "key",
                "known_hosts": tmp_path / "known_hosts",
            }
        ),
    }


def test_every_type_is_opened_and_nothing_is_touched(tmp_path: Path) -> None:
    found = {name: open_destination(name, config) for name, config in every_type(tmp_path).items()}
    assert {name: place.name for name, place in found.items()} == {name: name for name in found}
    assert as_archive(found["offsite"]) is not None
    assert list(tmp_path.iterdir()) == []


def test_limits_take_no_ability_away(tmp_path: Path) -> None:
    for name, wanted in every_type(tmp_path).items():
        plain = open_destination(name, wanted)
        limited = open_destination(name, wanted.model_copy(update={"max_upload": 1024, "max_download": 4096}))
        assert limited.capabilities == plain.capabilities
        assert (as_tree(limited) is None) == (as_tree(plain) is None)
        assert (as_archive(limited) is None) == (as_archive(plain) is None)


def test_libraries_of_places_that_nobody_uses_are_not_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HEAVY], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("way", ["upload", "download"])
def test_a_bucket_is_written_and_read_no_faster_than_it_may_be(s3_server: S3Server, way: str) -> None:
    content = b"x" * 90_000
    limited = open_destination(
        "offsite",
        config(
            s3_server,
            max_upload=60_000 if way == "upload" else None,
            max_download=60_000 if way == "download" else None,
        ),
    )
    limited.initialise(datetime.now(UTC))
    begun = time.monotonic()
    limited.put(OBJECT, io.BytesIO(content))
    assert get(limited, OBJECT) == content
    assert time.monotonic() - begun >= 90_000 / 60_000 - 1  # a second's worth may pass at once
    assert Capability.CHECKSUMS in limited.capabilities


def test_a_place_that_cannot_be_reached_is_an_error_and_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = S3Config.model_validate(
        {
            "type": "s3",
            "bucket": "acme-backups",
            "endpoint_url": "http://127.0.0.1:9",
            "region": "eu-central-1",
            "credentials_file": _credentials(tmp_path),
        }
    )
    monkeypatch.setattr("storage.s3.client.FIRST_PAUSE", 0.02)
    with pytest.raises(DestinationError, match="offsite"):
        put(open_destination("offsite", nowhere), OBJECT, b"x")


def _credentials(folder: Path) -> Path:
    file = folder / "credentials"
    file.write_text("[default]\naws_access_key_id=someone\naws_secret_access_key=something\n")
    return file
