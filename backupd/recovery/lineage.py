"""Whose backups lie under a server's name. Pure.

The name of a server is all that a destination files backups by. Where two installations share a place and each calls a
server by the same name, the backups of both lie there side by side; only the uuid that the server itself had tells them
apart. A backup is our own when its uuid is that of one that this installation made. A server that was replaced or
restored has another uuid from then on, and both are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backupd.model.backup import BackupRecord


@dataclass(frozen=True, slots=True)
class Strange:
    """Backups under our server's name of a server with another uuid, which this installation never backed up.

    ``former``: all of them ended before the first of ours, as after a rebuild of the catalog of a server that was
    replaced; otherwise two servers live under one name.
    """

    uuid: str
    ours: str
    backups: tuple[str, ...]
    former: bool

    def words(self, server: str) -> str:
        count = f"{len(self.backups)} backups under the name {server} are" if len(self.backups) > 1 else \
            f"backup {self.backups[0]} under the name {server} is"
        return f"{count} of server {self.uuid}; ours is {self.ours}"


def strangers(records: Iterable[BackupRecord]) -> tuple[Strange, ...]:
    """Of one server; nothing where this installation made no backup of it, so that nobody can tell."""
    everything = sorted(records, key=lambda record: (record.finished_at, record.id))
    made = [record for record in everything if record.manifest and record.server_uuid]
    ours = {record.server_uuid for record in made}
    if not made:
        return ()
    found: dict[str, list[BackupRecord]] = {}
    for record in everything:
        if record.server_uuid and record.server_uuid not in ours:
            found.setdefault(record.server_uuid, []).append(record)
    begun = min(record.finished_at for record in everything if record.server_uuid in ours)
    return tuple(Strange(uuid, made[-1].server_uuid, tuple(record.id for record in some),
                         former=some[-1].finished_at < begun) for uuid, some in sorted(found.items()))


def lineages(records: Sequence[BackupRecord]) -> dict[str, str]:
    """Of each backup (by id) of one server: whose it is, so that none of one stands in for one of another. "" is ours,
    and whatever nobody can tell apart from that; else the uuid."""
    known = {record.server_uuid for record in records if record.server_uuid}
    ours = {record.server_uuid for record in records if record.server_uuid and record.manifest}
    if len(known - ours) + bool(ours) < 2:
        return {record.id: "" for record in records}
    return {record.id: "" if record.server_uuid in ours else record.server_uuid for record in records}


def standing_aside(records: Sequence[BackupRecord], *, latest: bool) -> tuple[Strange, ...]:
    """Those whose backups a target does not mean, unless it names one of them: none of a stranger is ever the
    ``latest``, and a moment is one of a former server only."""
    return tuple(one for one in strangers(records) if latest or not one.former)
