"""The data directory that a dead node left: how far it had come, and out of the way with it. It is never deleted.

Read only, for it may be all that holds the node's last transactions: grastate.dat after a clean stop; after a crash the
last Xid of its binary logs, below which it certainly is not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.binlog.xids import xids
from backupd.model.binlog import MAGIC
from backupd.model.errors import BackupdError, RefusedError
from backupd.model.server_facts import ClusterPosition
from backupd.process.folders import opened, sync_folder
from restore.datadir.occupancy import foreign_entries
from restore.galera import grastate

_LOOKED_AT = 2
"""The last binary logs: the newest one may hold no transaction yet."""


@dataclass(frozen=True, slots=True)
class Remains:
    """``position``: None where nothing shows it; ``exact``: else it may be further."""

    datadir: Path
    position: ClusterPosition | None
    exact: bool

    def words(self, cluster: int) -> str:
        """Beside the ``cluster``'s last seqno."""
        if self.position is None:
            return f"the old data directory does not show its last seqno; the cluster is at {cluster}"
        about = "" if self.exact else "at least "
        return f"the old data directory is at {about}seqno {self.position.seqno}; the cluster is at {cluster}"


def remains_of(datadir: Path, log_bin: str) -> Remains | None:
    """What is known of ``datadir``; None where there is none, or nothing in it. ``log_bin``: the option, "" for the
    usual names."""
    if not datadir.is_dir() or not foreign_entries(datadir):
        return None
    state = grastate.read(datadir)
    if state is None:
        return Remains(datadir, None, exact=False)
    if state.is_explicit:
        return Remains(datadir, state.position, exact=True)
    last = max(_numbers(datadir, log_bin), default=-1)
    position = (
        ClusterPosition(state.position.uuid, last) if last >= 0 and state.position.uuid != grastate.NOBODY else None
    )
    return Remains(datadir, position, exact=False)


def refuse_no_old_datadir(datadir: Path) -> None:
    """Raises RefusedError for a folder with something in it that is no node's data directory: only that is moved."""
    if not (datadir / "ibdata1").exists() and not (datadir / grastate.GRASTATE).exists():
        raise RefusedError(
            f"{datadir} is not empty, and it is no data directory of a node",
            detail="\n".join(foreign_entries(datadir)[:20]),
            hint="name the node's data directory, or an empty one",
        )
    if os.path.ismount(datadir):
        raise RefusedError(
            f"{datadir} is a mount point: what is in it cannot be moved aside by one rename",
            hint="move its content into another folder yourself, and keep it until the node is back",
        )


def aside_name(datadir: Path, restore_id: str) -> Path:
    """What the old data directory is called from then on."""
    return datadir.with_name(f"{datadir.name}.old-{restore_id}")


def move_aside(datadir: Path, aside: Path) -> None:
    """One rename, on the disk. May be repeated after a kill. Raises RefusedError where the system does not let us."""
    if datadir.is_dir() and foreign_entries(datadir) and not aside.exists():
        try:
            datadir.rename(aside)
        except OSError as error:
            raise RefusedError(
                f"the old data directory {datadir} cannot be moved aside: {error.strerror}",
                hint=f"move it to {aside} yourself and repeat the command: it continues where it stopped",
            ) from error
        sync_folder(datadir.parent)


def _numbers(datadir: Path, log_bin: str) -> Iterator[int]:
    """Xids in its last binary logs, as far as these can be read."""
    name = Path(datadir / log_bin) if log_bin and log_bin not in ("1", "ON") else None
    folder = name.parent if name is not None else datadir
    pattern = f"{name.name}.[0-9]*" if name is not None else "*.[0-9]*"
    logs = [path for path in folder.glob(pattern) if path.suffix[1:].isdecimal() and _is_log(path)]
    own = [path for path in logs if name is not None or "relay" not in path.name]
    for path in sorted(own, key=lambda one: int(one.suffix[1:]))[-_LOOKED_AT:]:
        with contextlib.suppress(BackupdError):  # the server died while it wrote there
            yield from (xid.number for xid in xids(path))


def _is_log(path: Path) -> bool:
    with contextlib.suppress(OSError), opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as descriptor:
        return os.read(descriptor, len(MAGIC)) == MAGIC
    return False


def remove_foreign_logs(data: Path) -> tuple[str, ...]:
    """Remove from a prepared copy what is of the node that was backed up: its binary and relay logs with their lists,
    and what remembers a source; gives their names."""
    found = [path for path in data.iterdir() if path.is_file() and path.suffix[1:].isdecimal() and _is_log(path)]
    bases = {path.stem for path in found}
    found += [data / f"{base}{end}" for base in bases for end in (".index", ".state")]
    found += [data / name for name in ("relay-log.info", "master.info", "donor_galera_info", *grastate.CACHES)]
    found += [*data.glob("master-*.info"), *data.glob("relay-log-*.info"), *data.glob("multi-master.info")]
    removed = [path for path in found if path.is_file() and not path.is_symlink()]
    for path in removed:
        path.unlink()
    return tuple(sorted(path.name for path in removed))
