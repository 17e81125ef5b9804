"""``RECOVER.md``: what a destination says to somebody who has nothing but it and a private key.

It is in the clear, so it names servers and backups (as the keys there do), and no schema, table, account or secret.
Its shell blocks are one script that is cut into steps. Of a bucket with versions it also says how files that somebody
deleted or overwrote come back with ``aws``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from importlib.metadata import version
from shlex import quote
from typing import Any, NamedTuple
from urllib.parse import quote as in_url

from backupd.app.context.trust import signed_servers, signing
from backupd.app.context.wiring import Wiring
from backupd.app.metacopies.copy_check import COPY_NOTE, CopyNote
from backupd.model.errors import DamagedError, KeyUnusableError, ObjectMissingError
from backupd.transfer.deletion import marks
from backupd.transfer.records.authenticity import Signing
from backupd.transfer.records.manifests import backup_ids, get_bytes, put_bytes
from restore.runbook.shared_steps import document, shell, signature_check
from storage import layout
from storage.config import DestinationConfig, FilesystemConfig, S3Config
from storage.destination import Destination, marker_problem

_PASSING = (layout.INTENTS, layout.PINS, layout.SWEEPS, layout.TOMBSTONES, layout.QUARANTINE, layout.MARKS)
_ONCE = (layout.OBJECTS, layout.SERVERS)
"""Here nothing is ever written twice, so what was put over it is somebody else's."""
_OF_ITS_HOST = frozenset(
    {"path", "credentials_file", "profile", "ca_file", "key_file", "known_hosts", "max_upload", "max_download"}
)
"""Fields that say something about the host that was lost only."""
_POLICIES = ("unsigned", "signed")
"""The policy of a server in the configuration for the recovery: of one that is not signed, of one that is."""
_VARIABLE = re.compile(r"@@([A-Z_]+)@@")


@dataclass(frozen=True, slots=True)
class _Access:
    """How to get at a destination. ``settings``: shell that defines ``names FOLDER`` and ``fetch KEY``; ``fields``:
    its configuration, with ``@@NAME@@`` for variables of the shell; ``by_hand``: shell that brings what the
    runbook in ``BASE`` needs to the folder ``REPOSITORY``, where it is not one."""

    words: str
    needs: str
    settings: str
    fields: Mapping[str, Any]
    by_hand: str = ""


def recover_text(
    name: str,
    config: DestinationConfig,
    newest: Mapping[str, str],
    *,
    recipients: Sequence[str],
    signing: Signing | None = None,
    signed: Collection[str] = (),
) -> str:
    """Markdown. ``name``: what the destination is called; ``newest``: of each server with backups there the id of the
    newest; ``recipients``: fingerprints of the keys of which each opens everything; ``signed``: servers of which only
    what is signed is believed, as ``signing`` says."""
    access = _access(name, config)
    servers = sorted(newest)
    encryption: dict[str, Any] = {"gnupg_home": "@@GNUPGHOME@@", "recipients": list(recipients)}
    if signing is not None:
        encryption["trusted_signers"] = list(signing.trusted)
    policy = {"physical": {"full": "every 365d"}, "destinations": {"required": [name]}}
    copies = {"folder": layout.CONFIGURATIONS, "sig": layout.SIGNATURE}
    unaltered = signing is not None and signed
    return document(
        "recover",
        version=version("backupd"),
        words=access.words,
        needs=access.needs,
        recipients=_bullets(recipients),
        signers=_bullets(signing.trusted) if signing is not None else "",
        rows=rows_of(newest),
        back=recover_versions_text(config, name) if isinstance(config, S3Config) else "",
        cold=" or ".join(_cold(config)),
        catalogs=layout.CATALOGS,
        script={
            "settings": shell(
                "recover",
                "settings",
                first=servers[0] if servers else "NAME",
                trust=f"{signature_check()}export SIGNER" if signing is not None else "",
                place=access.settings,
            ),
            "configuration": shell(
                "recover",
                "configuration",
                configurations=layout.CONFIGURATIONS,
                names=" ".join(map(quote, servers)) or '""',
                sig=layout.SIGNATURE,
                trusted=shell("recover", "trusted_copy", **copies) if signed else "",
                named=shell("recover", "named_copy") if signed else "",
            ),
            "recovery": shell(
                "recover",
                "recovery",
                servers=_here({one: {"policy": _POLICIES[one in signed], "owner": "@@OWNER@@"} for one in servers}),
                destinations=_here({name: access.fields}),
                encryption=_here(encryption),
                policy=_here(policy),
                signed_policy=_here({**policy, "signed": True}),
            ),
            "what": shell("recover", "what", destination=name),
            "restore": shell("recover", "restore"),
            "by_hand": "\n".join(
                (
                    shell("recover", "newest", server_folders=layout.SERVERS),
                    *([_unaltered(signed)] if unaltered else ()),
                    access.by_hand,
                    shell("recover", "steps"),
                )
            ),
        },
    )


def _unaltered(signed: Collection[str]) -> str:
    """Shell that stops at what is not signed, of the servers ``signed``."""
    servers = " | ".join(map(quote, sorted(signed)))
    return shell("recover", "unaltered", servers=servers, sig=layout.signature_key("manifest.json"))


def rows_of(newest: Mapping[str, str]) -> str:
    """The list of the newest backup of each server, as the text has it."""
    return (
        "\n".join(f"- `{server}`: `{layout.runbook_key(server, newest[server])}`" for server in sorted(newest))
        or "- none"
    )


def rows_in(text: str) -> dict[str, str]:
    """What ``rows_of`` made of it."""
    found = re.findall(r"^- `([^`]+)`: `([^`]+)`$", text, re.MULTILINE)
    return {server: owner[1] for server, key in found if (owner := layout.backup_of(key)) is not None}


def made_by(text: bytes) -> str | None:
    """The version that wrote a text; None where it names none."""
    found = re.search(rb"made by backupd (\S+?)[.] ", text)
    return found[1].decode() if found else None


def _access(name: str, config: DestinationConfig) -> _Access:
    fields = {
        name: value
        for name, value in config.model_dump(mode="json", exclude_unset=True).items()
        if name not in _OF_ITS_HOST and value is not None
    }
    if isinstance(config, FilesystemConfig):
        return _Access(
            "This folder",
            "- this folder, whose path you set as `REPOSITORY`",
            shell("recover", "folder"),
            {**fields, "path": "@@REPOSITORY@@"},
        )
    if isinstance(config, S3Config):
        prefix = f"{config.prefix}/" if config.prefix else ""
        style = shell("recover", "s3_style", style=config.addressing) + "\n\n" if config.addressing != "auto" else ""
        return _Access(
            f"This bucket, `{config.bucket}`" + (f", below `{prefix}`," if prefix else ""),
            "- `aws`, and credentials that may list and read this bucket, where it finds them: "
            "`AWS_SHARED_CREDENTIALS_FILE`, or `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, are exported"
            + (", and `AWS_CA_BUNDLE`, since a private CA signed its certificate" if config.ca_file else ""),
            style + shell("recover", "s3", place=quote(f"s3://{config.bucket}/{prefix}"), options=_options(config)),
            fields,
            shell("recover", "fetch_named", destination=name, kind="S3"),
        )
    options, fetch = shell("recover", "sftp_options"), shell("recover", "fetch_named", destination=name, kind="SFTP")
    target, folder = quote(f"{config.user}@{config.host}"), quote(_batch(config.path))
    return _Access(
        f"This folder, `{config.path}` on {config.host},",
        "- `sftp`, a private SSH key that this host accepts, whose path you set as `SFTP_KEY`, and a file with the "
        "host's own key, whose path you set as `KNOWN_HOSTS`",
        shell("recover", "sftp", target=target, port=config.port, folder=folder),
        {"path": config.path, **fields, "key_file": "@@SFTP_KEY@@", "known_hosts": "@@KNOWN_HOSTS@@"},
        f"{options}\n\n{fetch}",
    )


def _options(config: S3Config) -> str:
    """For every call of ``aws``."""
    named = (("--endpoint-url", config.endpoint_url), ("--region", config.region))
    return "".join(f" {option} {quote(value)}" for option, value in named if value)


def _cold(config: DestinationConfig) -> list[str]:
    """Archive classes that hold something which has to be thawed before it can be read."""
    used = {config.storage_class, config.binlog_storage_class} if isinstance(config, S3Config) else set()
    return sorted(f"`{name}`" for name in used & {"GLACIER", "DEEP_ARCHIVE"})


def _batch(path: str) -> str:
    """A path inside double quotes, as sftp reads them in a batch."""
    return path.replace("\\", "\\\\").replace('"', '\\"')


def _bullets(words: Sequence[str]) -> str:
    return "\n".join(f"- `{word}`" for word in words)


def _here(document: Mapping[str, Any]) -> str:
    """As JSON, which YAML understands, inside a here-document that replaces variables."""
    text = json.dumps(document, ensure_ascii=False, sort_keys=True)
    return _VARIABLE.sub(r"$\1", re.sub(r"([\\$`])", r"\\\1", text))


def recover_versions_text(config: S3Config, name: str) -> str:
    """Markdown, with a block of shell that does something only where ``SINCE`` is set. It begins where ``BASE`` and
    ``problem`` are there. ``name``: what the destination is called."""
    prefix = f"{config.prefix}/" if config.prefix else ""
    script = shell(
        "recover",
        "versions",
        options=_options(config),
        bucket=quote(config.bucket),
        prefix=quote(prefix),
        json=quote(json.dumps(prefix)[1:-1]),
        source=quote(in_url(f"{config.bucket}/{prefix}")),
        passing="|".join(_PASSING),
        once="|".join(_ONCE),
    )
    return document("recover_versions", destination=name, script=script)


# -- is it what it should be?


class Kind(Enum):
    """What is wrong with RECOVER.md. ``STALE``: it was right when it was written; ``UNKNOWN``: nobody noted what was
    written there, and an earlier version may have; ``DAMAGED``: anything else."""

    STALE = auto()
    UNKNOWN = auto()
    DAMAGED = auto()


class TextProblem(NamedTuple):
    text: str
    kind: Kind = Kind.DAMAGED


_ALTERED = TextProblem("holds other bytes than were written, or lists other backups than are stored there")
_UNKNOWN = TextProblem(
    "is not what this version writes there, and no record of the write exists (an earlier version?)", Kind.UNKNOWN
)


def newest(destination: Destination) -> dict[str, str]:
    """Of each server that has backups there, the newest that is not marked deleted."""
    dying = marks(destination)
    return {server: backup_id for server, backup_id in backup_ids(destination) if (server, backup_id) not in dying}


def text_of(
    wiring: Wiring, destination: Destination, recipients: Sequence[str], named: Mapping[str, str] | None = None
) -> bytes:
    signed = signed_servers(wiring.settings)
    return recover_text(
        destination.name,
        wiring.settings.destination(destination.name),
        newest(destination) if named is None else named,
        recipients=recipients,
        signing=signing(wiring.settings) if signed else None,
        signed=signed,
    ).encode()


def _stale(
    wiring: Wiring, destination: Destination, found: str, wanted: bytes, recipients: Sequence[str]
) -> TextProblem | None:
    """Why a text that this installation put there is out of date. A backup that it names and that is gone is no
    reason: `verify` reports that."""
    named = rows_in(found)
    late = [
        f"{backup_id} of {server}"
        for server, backup_id in sorted(newest(destination).items())
        if named.get(server, "") < backup_id
    ]
    if late:
        return TextProblem(f"is stale: it does not name {', '.join(late)}", Kind.STALE)
    if made_by(found.encode()) == made_by(wanted) and text_of(wiring, destination, recipients, named) != found.encode():
        return TextProblem("is stale: the configuration has changed since it was written", Kind.STALE)
    return None


def text_problem(
    wiring: Wiring, destination: Destination, note: CopyNote, recipients: Sequence[str]
) -> TextProblem | None:
    """What is wrong with RECOVER.md; None for nothing. Where installations share a destination, the text of another one
    is as good as ours while it names the same backups."""
    wanted = text_of(wiring, destination, recipients)
    noted = note.get(destination.name, layout.RECOVER)
    try:
        found = get_bytes(destination, layout.RECOVER)
    except ObjectMissingError:
        return TextProblem("is missing") if noted is not None or newest(destination) else None
    except DamagedError as error:
        return TextProblem(" ".join((error.detail or error.message).split()))
    if hashlib.sha256(found).hexdigest() == noted or found == wanted:
        return None if found == wanted else _stale(wiring, destination, found.decode(), wanted, recipients)
    rows = rows_of(newest(destination)).encode()
    mine = hashlib.sha256(wiring.identity_key()).hexdigest()[:12]
    shared = any(
        copy[1] != mine
        for info in destination.list(layout.CONFIGURATIONS)
        if (copy := layout.copy_of(info.key)) is not None
    )
    if rows in found and (shared or (noted is None and made_by(found) not in (None, made_by(wanted)))):
        return None  # of another installation, or of an earlier version: the next job writes it anew
    return _ALTERED if noted is not None else _UNKNOWN


def texts_problems(wiring: Wiring, destination: Destination) -> dict[str, str]:
    """Of ``fsck``: what is wrong with the two documents at the top of a destination, by key. Changes nothing. Raises
    DestinationError."""
    note = CopyNote(wiring.settings.spool / COPY_NOTE)
    found = {}
    try:
        found[layout.REPOSITORY] = marker_problem(
            get_bytes(destination, layout.REPOSITORY), note.marker(destination.name)
        )
    except ObjectMissingError:
        pass  # a destination that needs none
    except DamagedError as error:
        found[layout.REPOSITORY] = " ".join((error.detail or error.message).split())
    try:
        _keys, recipients = wiring.recipients()
    except KeyUnusableError:
        recipients = ()  # `check` says so; without them nobody can say what the text should be
    if recipients:
        problem = text_problem(wiring, destination, note, recipients)
        if problem is not None and problem.kind is not Kind.STALE:  # the next job replaces that, `verify` reports it
            found[layout.RECOVER] = problem.text
    return {key: why for key, why in found.items() if why}


def mend_marker(wiring: Wiring, destination: Destination) -> bool:
    """Put the marker back as it was seen; was it known? Raises DestinationError."""
    noted = CopyNote(wiring.settings.spool / COPY_NOTE).marker(destination.name)
    if noted is not None:
        put_bytes(destination, layout.REPOSITORY, noted)
    return noted is not None


def noted_marker(wiring: Wiring, name: str) -> str:
    """What ``repository.json`` of a destination holds, in one line; "" where that is not known."""
    noted = CopyNote(wiring.settings.spool / COPY_NOTE).marker(name)
    return " ".join(noted.decode().split()) if noted is not None else ""
