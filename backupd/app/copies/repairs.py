"""Damage that another destination's copy can put right, and what is told of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from backupd.app.context.wiring import Wiring
from backupd.model.binlog import SegmentKey
from backupd.model.errors import BackupdError, NotFoundError
from backupd.model.event import Event, Severity
from backupd.model.job import silent
from backupd.model.manifest import Header
from backupd.model.text import new_id
from backupd.recovery.chains import chain_of
from backupd.transfer.copies import Order, replicate
from backupd.transfer.guards.holds_and_marks import is_marked
from backupd.transfer.guards.lease import exists
from backupd.transfer.guards.object_locks import each
from backupd.transfer.log_segments import keys
from backupd.transfer.repair import inode_of, put_manifest_right, put_right, put_segment_right, show_again
from backupd.transfer.scrub import Damage
from storage.contract import layout
from storage.contract.destination import Destination, as_archive, as_tree

ROT = "rot-found"
REPAIRED = "rot-repaired"
_WORKERS = 4
"""Objects that are put right at once; each is in memory, 16 MiB at most as a rule."""


def mend(
    wiring: Wiring,
    destination: Destination,
    server: str,
    headers: Sequence[Header],
    damages: Sequence[Damage],
) -> tuple[Damage, ...]:
    """Put ``damages`` at ``destination``, all of ``server``, right from other destinations as far as they can; the same
    damages with what came of it, told as events. ``headers``: the readable manifests of that server there."""
    if not damages:
        return ()
    sources = sorted(
        (other for other in wiring.usable_destinations() if other.name != destination.name),
        key=lambda other: as_archive(other) is not None,
    )
    found = _Mending(wiring, destination, server, sources).mend(headers, damages)
    _tell(wiring, destination, server, found)
    return found


class _Mending:
    def __init__(self, wiring: Wiring, destination: Destination, server: str, sources: Sequence[Destination]) -> None:
        self._wiring, self._destination, self._server, self._sources = wiring, destination, server, sources

    def mend(self, headers: Sequence[Header], damages: Sequence[Damage]) -> tuple[Damage, ...]:
        tree = as_tree(self._destination)
        pooled = [damage for damage in damages if damage.key.startswith(layout.OBJECTS)]
        before = {
            inode: layout.name_in(damage.key)
            for damage in pooled
            if tree is not None and (inode := inode_of(tree, damage.key)) is not None
        }
        done = dict(zip((id(damage) for damage in pooled), each(self._one, pooled, workers=_WORKERS), strict=True))
        segments: dict[str, list[Damage]] = {}
        for damage in damages:
            if damage.key.startswith(layout.BINLOGS):
                segments.setdefault(damage.key.rpartition("/")[0], []).append(damage)
            elif id(damage) not in done:
                done[id(damage)] = self._one(damage)
        for group in segments.values():
            done |= {id(damage): found for damage, found in zip(group, self._segment(group), strict=True)}
        mended = {layout.name_in(one.key) for one in done.values() if one.repaired_from}
        if tree is not None and mended:
            for header in headers:
                if any(item.name in mended for item in header.objects):
                    show_again(tree, header, before)
        return tuple(done[id(damage)] for damage in damages)

    def _one(self, damage: Damage) -> Damage:
        try:
            return replace(damage, repaired_from=self._from(damage))
        except BackupdError as error:
            return replace(damage, trouble=_line(error))

    def _from(self, damage: Damage) -> str:
        if damage.stored is not None:
            return put_right(self._destination, damage.key, damage.stored, self._sources)
        owner = layout.backup_of(damage.key)
        if owner is None or damage.key != layout.manifest_key(*owner):
            raise NotFoundError("nothing says what should be there")
        if exists(self._destination, damage.key):
            return put_manifest_right(self._destination, *owner, self._sources, clock=self._wiring.clock)
        return self._whole(owner[1])

    def _whole(self, backup_id: str) -> str:
        """A backup whose manifest is gone. When all else is gone, too, nothing of it is left to be mended."""
        wiring, target = self._wiring, self._destination
        if is_marked(target, self._server, backup_id):
            raise NotFoundError("it is marked deleted there")
        if not exists(target, layout.body_key(self._server, backup_id)):
            raise NotFoundError(
                "nothing of it is there any more, and nobody marked it deleted",
                detail=f"`backupd replicate {self._server} --to {target.name}` copies it again where "
                "another destination has it, `backupd fsck --repair` forgets it",
            )
        chain = chain_of(backup_id, wiring.catalog.backups.list(self._server, foreign=True))
        order = Order(self._server, backup_id, new_id(wiring.clock()), tuple(member.id for member in chain[:-1]))
        holding = [one for one in self._sources if exists(one, layout.manifest_key(self._server, backup_id))]
        replicate(holding, target, order, clock=wiring.clock, report=silent, check=_go_on)
        return holding[0].name if holding else ""

    def _segment(self, damages: Sequence[Damage]) -> list[Damage]:
        found = layout.segment_of(damages[0].key)
        try:
            if found is None:
                raise NotFoundError("it is no binary log")
            server, key, _name = found
            gone = not exists(self._destination, layout.segment_key(server, key))
            if gone and not any(other < key for other in self._stored_of(key.branch)):
                raise NotFoundError(
                    "it is not there any more, and nothing before it is either",
                    detail="`backupd fsck --repair` forgets it",
                )
            source = put_segment_right(
                self._destination,
                server,
                key,
                [damage.key for damage in damages],
                self._sources,
                clock=self._wiring.clock,
                check=_go_on,
            )
            self._wiring.catalog.binlogs.mark_verified(server, [key], self._destination.name, self._wiring.clock())
        except BackupdError as error:
            return [replace(damage, trouble=_line(error)) for damage in damages]
        return [replace(damage, repaired_from=source) for damage in damages]

    def _stored_of(self, branch: str) -> Iterator[SegmentKey]:
        folder = layout.branch_folder(self._server, branch)
        return (key for _server, key in keys(self._destination, prefix=folder))


def _tell(wiring: Wiring, destination: Destination, server: str, damages: Sequence[Damage]) -> None:
    mended = [damage for damage in damages if damage.repaired_from]
    left = [damage for damage in damages if not damage.repaired_from]
    if mended:
        names = ", ".join(sorted({damage.repaired_from for damage in mended}))
        wiring.catalog.events.add(
            Event(
                wiring.clock(),
                REPAIRED,
                Severity.WARNING,
                server=server,
                subject=destination.name,
                message=f"{len(mended)} damaged files of {server} at destination {destination.name} were replaced by "
                "those "
                f"of {names}",
                detail="\n".join(map(str, mended)),
                hint=(
                    f"bytes that change by themselves come from a medium that fails: look at that of {destination.name}"
                ),
            )
        )
    if left:
        detail = "\n".join(f"{damage}: {damage.trouble}" for damage in left)
        last = wiring.catalog.events.last(server, (ROT,), destination.name)
        if last is None or last.detail != detail:
            wiring.catalog.events.add(
                Event(
                    wiring.clock(),
                    ROT,
                    Severity.ERROR,
                    server=server,
                    subject=destination.name,
                    message=f"{len(left)} files of {server} at destination {destination.name} are damaged, "
                    "and no other destination has them",
                    detail=detail,
                    hint=f"take a full backup now, it stores the data afresh: backupd backup {server} --kind full",
                )
            )


def _line(error: BackupdError) -> str:
    return " ".join((f"{error.message}: {error.detail}" if error.detail else error.message).split())


def _go_on() -> None:
    """A repair is not stopped half way."""
