"""The section of a runbook about copies that lie elsewhere: how they come to this machine, with ``aws`` or ``sftp``.

Each destination has shell blocks of its own (``shell``, where the steps of the restore are ``sh``): one destination is
chosen, the steps are followed all. The blocks name endpoint, bucket, host and folder, and no secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from backupd.model.text import format_size
from restore.runbook.shared_steps import quote
from restore.runbook.texts import document, shell
from storage.contract import layout
from storage.contract.config import DestinationConfig, S3Config, SftpConfig

NOWHERE: Mapping[str, DestinationConfig] = MappingProxyType({})

_ARCHIVE_HOURS = {
    "GLACIER": "`Expedited` 5 minutes (where it is to be had), `Standard` 5 hours, `Bulk` 12 hours",
    "DEEP_ARCHIVE": "`Standard` 12 hours, `Bulk` 48 hours; `Expedited` is not to be had",
}
"""Classes that have to be thawed, and how long that takes."""


def render_places(server: str, chain: Sequence[str], places: Mapping[str, DestinationConfig], *, stored: int) -> str:
    """Markdown; empty where all ``places`` are folders. ``chain``: the backups that are needed; ``stored``: bytes that
    are fetched for them, at most."""
    away = {name: place for name, place in places.items() if isinstance(place, (S3Config, SftpConfig))}
    if not away:
        return ""
    return document(
        "destinations",
        places=[
            {
                "name": name,
                "config": place,
                **(_s3(place, server, chain) if isinstance(place, S3Config) else _sftp(place, server, chain)),
            }
            for name, place in away.items()
        ],
        folders=[name for name in places if name not in away],
        size=format_size(stored),
        hours=_ARCHIVE_HOURS,
    )


def _s3(place: S3Config, server: str, chain: Sequence[str]) -> dict[str, str]:
    """The blocks of shell."""
    folder = f"{place.prefix}/" if place.prefix else ""
    settings = [f"export AWS_DEFAULT_REGION={quote(place.region)}"] if place.region else []
    if place.addressing != "auto":
        settings += [
            "printf '[default]\\ns3 =\\n    addressing_style = %s\\n' "
            + place.addressing
            + ' > "$REPOSITORY/aws-config"',
            'export AWS_CONFIG_FILE="$REPOSITORY/aws-config"',
        ]
    values = {
        "chain": " ".join(chain),
        "server": server,
        "servers": layout.SERVERS,
        "logs": layout.binlogs_folder(server),
        "settings": "\n".join(settings),
        "endpoint": f" --endpoint-url {quote(place.endpoint_url)}" if place.endpoint_url else "",
        "from": quote(f"s3://{place.bucket}/{folder}".rstrip("/")),
        "bucket": quote(place.bucket),
        "prefix": quote(folder),
    }

    def block(name: str, **more: str) -> str:
        return shell("destinations", name, **values, **more)

    def force(storage_class: str) -> str:
        return " --force-glacier-transfer" if storage_class in _ARCHIVE_HOURS else ""

    thaw, frozen = block("s3_thaw_one"), block("s3_frozen_one")
    fetch = block("s3_fetch_folder", force=force(place.storage_class))
    return {
        "lists": block("s3_lists", names=block("names")),
        "thaw": block("s3_thaw", thaw_one=thaw, keys="objects-keys.txt"),
        "frozen": block("s3_frozen", frozen_one=frozen, keys="objects-keys.txt"),
        "fetch": block("s3_fetch", fetch_folder=fetch, check=block("check")),
        "log_keys": block("s3_log_keys"),
        "thaw_logs": block("s3_thaw", thaw_one=thaw, keys="log-keys.txt"),
        "frozen_logs": block("s3_frozen", frozen_one=frozen, keys="log-keys.txt"),
        "logs": block("s3_logs", force=force(place.binlog_storage_class)),
    }


def _sftp(place: SftpConfig, server: str, chain: Sequence[str]) -> dict[str, str]:
    """The blocks of shell."""
    enter = f"cd {_batch_word(place.path)}"
    folders = [layout.backup_folder(server, backup).rstrip("/") for backup in chain]
    values = {
        "port": place.port,
        "account": quote(f"{place.user}@{place.host}"),
        "enter": enter,
        "enter_word": quote(enter),
        "gets": "\n".join(f"get -r {folder} {layout.SERVERS}{server}" for folder in folders),
        "server": server,
        "servers": layout.SERVERS,
        "chain": " ".join(chain),
        "logs": layout.binlogs_folder(server).rstrip("/"),
        "binlogs": layout.BINLOGS.rstrip("/"),
    }
    names, check = shell("destinations", "names", **values), shell("destinations", "check")
    return {
        "fetch": shell("destinations", "sftp_fetch", names=names, check=check, **values),
        "logs": shell("destinations", "sftp_logs", **values),
    }


def _batch_word(text: str) -> str:
    """``text`` as one word of sftp's own commands."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
