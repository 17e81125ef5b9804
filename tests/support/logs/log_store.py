"""An installation with an archive of binary logs that no stream wrote: real logs and real seals, no server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.catalog.session import open_catalog
from backupd.model.binlog import Branch, BranchReason, SegmentKey
from backupd.transfer.records.encryption import Sealer
from tests.support.keys import Keys
from tests.support.logs.archived_logs import archive_log
from tests.support.logs.real_logs import RealLog

SERVER = "shop"
BRANCH = Branch(
    SERVER,
    "20261121T040000Z-0000000a",
    datetime(2026, 11, 21, 4, tzinfo=UTC),
    BranchReason.FIRST,
    "u",
    "mariadb",
    "binlog",
    1,
)
DESTINATIONS = ("local", "offsite")
_CONFIG = """
catalog: sqlite:///{base}/catalog.db
spool: {base}/spool
policies: {base}/policies
servers: {{{server}: {{socket: /nowhere.sock, policy: gold}}}}
destinations:
  local: {{type: filesystem, path: {base}/local}}
  offsite: {{type: filesystem, path: {base}/offsite}}
encryption: {{gnupg_home: {public}, recipients: [{user}]}}
{restore}
"""


@contextmanager
def wired(tmp_path: Path, keys: Keys) -> Iterator[Wiring]:
    """An installation whose two destinations have nothing yet, and whose catalog knows nothing."""
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "gold.yaml").write_text(
        'physical: {full: "0 2 * * *"}\nbinlog: {stream: true}\ndestinations: {required: [local, offsite]}\n'
    )
    file = tmp_path / "backupd.yaml"
    file.write_text(
        _CONFIG.format(
            base=tmp_path,
            server=SERVER,
            public=keys.public_home,
            user=keys.user_id,
            restore=f"restore: {{gnupg_home: {keys.secret_home}, scratch: {{path: {tmp_path}/scratch}}}}",
        )
    )
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        found = Wiring(load_settings(file), catalog)
        for name in DESTINATIONS:
            found.destination(name).initialise(found.clock())
        yield found


def store(
    wiring: Wiring,
    keys: Keys,
    logs: tuple[RealLog, ...],
    *,
    destinations: tuple[str, ...] = DESTINATIONS,
    known: bool = True,
    branch: Branch = BRANCH,
    start: int = 0,
    end: int | None = None,
) -> None:
    sealer = Sealer([keys.fingerprint], keys.public_home)
    if known:
        wiring.catalog.binlogs.add_branch(branch)
    for log in logs:
        for destination in destinations:
            header = archive_log(
                wiring.destination(destination),
                sealer,
                branch,
                log.number,
                log.data,
                start=start,
                end=end,
                ending=log.ending,
            )
            if known:
                wiring.catalog.binlogs.add_segment(header.segment, destination, header.stored_bytes, wiring.clock())


def key_of(log: RealLog) -> SegmentKey:
    return SegmentKey(BRANCH.id, log.number, 0, log.size)
