"""The runbook beside a logical backup: how to load it by hand, with gpg, zstd, tar, sh and the database's own client.

It is stored in the clear, so it names no schema, no table and no address. Its shell blocks are one script that is cut
into steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backupd.engine.toolset import CLIENTS
from backupd.model.manifest import Body, Header
from backupd.model.table import DumpFacts
from backupd.model.text import format_size, format_time
from restore.runbook.destinations import NOWHERE, render_places
from restore.runbook.shared_steps import first_look
from restore.runbook.texts import document, shell
from storage.contract import layout
from storage.contract.config import DestinationConfig


def render_logical_runbook(
    header: Header,
    body: Body,
    *,
    destinations: Sequence[str],
    places: Mapping[str, DestinationConfig] = NOWHERE,
    signed: bool = False,
) -> str:
    """Markdown. ``destinations``: the names of those that hold this backup; ``places``: what is known of the
    destinations that hold it or will; ``signed``: are manifests signed, so that others are refused?"""
    facts, info = body.facts, body.facts.server
    dump = facts.dump or DumpFacts(())
    client = CLIENTS[info.flavour].client
    trusted = first_look(header.server, (header.backup_id,), signed=signed)
    return document(
        "logical",
        backup=header.backup_id,
        server=header.server,
        began=format_time(header.started_at),
        ended=format_time(header.finished_at),
        version=f"{info.flavour} {info.version}",
        position=f"{facts.position.file}:{facts.position.pos}" if facts.position.file else "none (no binary log)",
        gtid=facts.position.gtid or "none",
        tool=f"{facts.tool.name} {facts.tool.version}",
        size=format_size(header.stats.bytes_source),
        files=header.stats.files,
        tables=len(dump.dumped),
        missing=header.tables_missing,
        later=sum(1 for table in dump.dumped if table.position is not None),
        recipients=", ".join(header.recipients),
        destinations=", ".join(destinations),
        client=client,
        set=header.table_set or "all of the policy",
        signed=signed,
        places=render_places(
            header.server, (header.backup_id,), places, stored=sum(item.size for item in header.objects)
        ),
        script={
            "settings": shell("logical", "settings", client=client, trusted=trusted),
            "unpack": shell("logical", "unpack", backup=header.backup_id, unpack=layout.UNPACK),
            **{name: shell("logical", name) for name in ("choose", "load", "rest")},
        },
    )
