"""What of a restore's plan is in an archive storage class, and what thawing it takes.

A copy that can be read as it is comes first. What asks an archive is imported where one is asked.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from backupd.app.context.wiring import Wiring
from backupd.app.restores.request import DEFAULT_OPTIONS, RestoreOptions
from backupd.model.backup_record import BackupRecord
from backupd.model.binlog import ReplaySpec, SegmentKey
from backupd.model.errors import ArchivedError, BackupdError, RefusedError
from backupd.model.text import format_duration, format_size, format_time
from restore.planning.plan import Plan, thaw_step
from storage.destination import ArchiveDestination, ColdState, as_archive, thawable

if TYPE_CHECKING:
    from backupd.model.thaw import ColdObject
    from backupd.transfer.thaw import Want

    Objects = Mapping[str, ColdObject]
    """What has to be thawed at one destination, by key."""

_SOON = timedelta(hours=1)


def with_thaw(
    wiring: Wiring,
    chosen: Plan,
    records: Iterable[BackupRecord],
    options: RestoreOptions = DEFAULT_OPTIONS,
    *,
    only: Container[str] | None = None,
) -> Plan:
    """``chosen`` with what has to be thawed for it, and its destinations in the order that needs least of that.
    ``only``: the names of the objects that are needed, None for all of each backup. Where ``options`` say everywhere,
    or name a tier: also where nothing is expected in an archive class, since a rule of the destination may have put it
    there.

    Asks the destinations, and moves nothing. One that does not answer gives a warning. Raises RefusedError for
    a tier that a storage class does not have.
    """
    archive, tier = wiring.settings.configuration.archive, options.thaw
    survey = _Survey(wiring, chosen, only, everywhere=options.everywhere or bool(tier))
    order, backups = survey.of_backups(records)
    objects = (*backups, *survey.of_logs())
    warnings = [*chosen.warnings, *dict.fromkeys(survey.warnings)]
    if survey.until is not None and survey.until < wiring.clock() + timedelta(seconds=2 * chosen.seconds) + _SOON:
        warnings.append(f"thawed copies expire from {format_time(survey.until)} on; another thaw extends that")
    made = replace(
        chosen,
        destinations=order,
        warnings=tuple(warnings),
        steps=tuple(
            replace(step, title=step.title.replace(f"from {chosen.destinations[0]},", f"from {order[0]},", 1))
            if step.name == "fetched"
            else step
            for step in chosen.steps
        ),
    )
    if not objects:
        return made
    from backupd.model.thaw import ThawPlan

    thaw = ThawPlan(objects, options.days or archive.days, tier or archive.tier, archive.prices.as_prices)
    if not tier:
        thaw = thaw.at_any_tier()
    made = replace(made, thaw=thaw, steps=(thaw_step(thaw), *made.steps))
    if chosen.rto is not None and made.seconds > chosen.rto:
        late = (
            f"with the thaw this takes up to {format_duration(made.seconds)}, longer than the "
            f"{format_duration(chosen.rto)} of objectives.rto"
        )
        made = replace(made, warnings=(*made.warnings, late))
    return made


def refuse_cold(chosen: Plan, *, hint: str = "") -> None:
    """Raises ArchivedError where something of the plan has to be thawed first."""
    thaw = chosen.thaw
    if thaw is None:
        return
    offers = [
        f"{offer.tier}: at most {offer.hours:g} h"
        + ("" if offer.cost is None else f", about {offer.cost:.2f} {thaw.prices.currency}")
        for offer in thaw.offers
    ]
    raise ArchivedError(
        f"{len(thaw.objects)} objects ({format_size(thaw.bytes)}) are in an archive class at destination "
        f"{thaw.destinations}: they have to be thawed first",
        detail="\n".join(offers),
        hint=hint
        or f"thaw them: backupd thaw {chosen.server} --to {chosen.target}; or add --thaw TIER to this command, which "
        "fetches the readable objects first",
    )


def cold_of_part(wiring: Wiring, chosen: Plan, part: str) -> tuple[ColdObject, ...]:
    """What cannot be read now of one part of a restore: of a backup at the first archive that answers, of the binary
    logs wherever they are needed from. Somebody has met it, so it is looked for everywhere."""
    from backupd.model.thaw import LOGS

    survey = _Survey(wiring, chosen, everywhere=True)
    if part == LOGS:
        return survey.of_logs() or survey.of_logs(whole=True)
    for name in chosen.destinations:
        archive = thawable(wiring.destination(name))
        if archive is not None and (cold := survey.of_backup(archive, part)) is not None:
            return tuple(cold.objects)
    return ()


@dataclass(slots=True)
class _Cold:
    """What was found of one thing at one destination. ``until``: when the first thawed copy goes away again."""

    objects: list[ColdObject] = field(default_factory=list)
    until: datetime | None = None


class _Survey:
    """Asking the destinations of one plan. ``until``: when the first thawed copy that counts goes away again."""

    def __init__(
        self, wiring: Wiring, chosen: Plan, only: Container[str] | None = None, *, everywhere: bool = False
    ) -> None:
        self._as_archive = thawable if everywhere else as_archive
        self._wiring, self._chosen, self._only = wiring, chosen, only
        self._archives: dict[str, ArchiveDestination | None] = {}
        self._silent: set[str] = set()
        self.until: datetime | None = None
        self.warnings: list[str] = []

    def of_backups(self, records: Iterable[BackupRecord]) -> tuple[tuple[str, ...], tuple[ColdObject, ...]]:
        """The destinations, best first, and what has to be thawed at the first."""
        chosen = self._chosen
        damaged = {
            copy.destination
            for record in records
            if record.id in chosen.chain
            for copy in record.copies
            if copy.state != "complete"
        }
        warm, cold = self._copies(name for name in chosen.destinations if name not in damaged)
        if warm and cold:
            self.warnings.append(
                f"the copy at {', '.join(cold)} would have to be thawed; it is read only for objects that the others "
                "lack"
            )
        return _best_first(chosen.destinations, warm, cold)

    def _copies(self, names: Iterable[str]) -> tuple[str, dict[str, Objects]]:
        """The first of ``names`` at which the whole chain can be read as it is, or an empty name; and of each before it
        that has the whole chain what has to be thawed there."""
        cold: dict[str, Objects] = {}
        for name in names:
            objects = self._of_chain(name) if self._answers(name) else None
            if objects:
                cold[name] = objects
            elif objects is not None:
                return name, cold
        return "", cold

    def _of_chain(self, name: str) -> Objects | None:
        """What has to be thawed at one destination that answers; None where not all of the chain is known there."""
        archive = self._archives[name]
        if archive is None:
            return {}
        found = [self.of_backup(archive, backup_id) for backup_id in self._chosen.chain]
        whole = [cold for cold in found if cold is not None]
        if len(whole) < len(found):
            return None
        # What several members share is needed when the first of them is read.
        objects = {one.key: one for cold in reversed(whole) for one in cold.objects}
        if not objects:
            self._note(whole)
        return objects

    def of_backup(self, archive: ArchiveDestination, backup_id: str) -> _Cold | None:
        """What of a backup is cold at one destination; None, with a warning, where that is not known."""
        from backupd.transfer.records.manifests import load_header
        from backupd.transfer.thaw import wants_of_backup
        from storage import layout

        try:
            wants = wants_of_backup(load_header(archive, self._chosen.server, backup_id))
            return _look(
                archive, [want for want in wants if self._only is None or layout.name_in(want.key) in self._only]
            )
        except BackupdError as error:
            self._say(archive.name, error)
            return None

    def of_logs(self, *, whole: bool = False) -> tuple[ColdObject, ...]:
        """What is replayed of binary logs and no destination gives as it is; ``whole``: all of their segments."""
        if self._chosen.replay is None:
            return ()
        found: list[ColdObject] = []
        ranges = {} if whole else _replayed(self._chosen.replay)
        for key, names in self._holders(self._chosen.replay).items():
            here = [name for name in names if name in self._wiring.settings.destinations and self._answers(name)]
            archives = [archive for name in here if (archive := self._archives[name]) is not None]
            if len(archives) < len(here):
                continue  # one of them gives it as it is
            colds = [
                cold
                for archive in archives
                if (cold := self._of_segment(archive, key, *ranges.get(key, (key.start, key.end)))) is not None
            ]
            readable = [cold for cold in colds if not cold.objects]
            if readable:
                self._note(readable)
            elif colds:
                found += min(colds, key=lambda cold: sum(one.size for one in cold.objects)).objects
        return tuple(found)

    def _of_segment(self, archive: ArchiveDestination, key: SegmentKey, begin: int, end: int) -> _Cold | None:
        from backupd.transfer import log_segments
        from backupd.transfer.thaw import wants_of_segment

        try:
            header = log_segments.load_header(archive, self._chosen.server, key)
            return _look(archive, wants_of_segment(header, begin, end))
        except BackupdError as error:
            self._say(archive.name, error)
            return None

    def _holders(self, replay: ReplaySpec) -> dict[SegmentKey, Sequence[str]]:
        """The segments that are replayed, and where the catalog knows each."""
        wanted = {key for leg in replay.legs for key in leg.segments}
        found: dict[SegmentKey, Sequence[str]] = {}
        for branch in sorted({key.branch for key in wanted}):
            numbers = [key.number for key in wanted if key.branch == branch]
            for record in self._wiring.catalog.binlogs.each_segment(
                self._chosen.server, branch, from_position=(min(numbers), 0), to_position=(max(numbers) + 1, 0)
            ):
                if record.key in wanted:
                    found[record.key] = tuple(record.destinations)
        return found

    def _answers(self, name: str) -> bool:
        """Can the destination be asked? What cannot be read is not warm either."""
        if name in self._silent:
            return False
        if name not in self._archives:
            try:
                destination = self._wiring.destination(name)
                if not destination.is_initialised():
                    raise RefusedError("it is not a repository: check that it is mounted")
                self._archives[name] = self._as_archive(destination)
            except BackupdError as error:
                self._silent.add(name)
                self._say(name, error)
                return False
        return True

    def _note(self, colds: Iterable[_Cold]) -> None:
        self.until = min(filter(None, (self.until, *(cold.until for cold in colds))), default=None)

    def _say(self, name: str, error: BackupdError) -> None:
        self.warnings.append(f"cannot determine the storage class of the objects at {name}: {error.message}")


def _replayed(replay: ReplaySpec) -> dict[SegmentKey, tuple[int, int]]:
    """From which byte to which one of its file each segment is read."""
    found: dict[SegmentKey, tuple[int, int]] = {}
    for leg in replay.legs:
        for key in leg.segments:
            begin, end = leg.range_of(key)
            before, after = found.get(key, (begin, end))
            found[key] = min(begin, before), max(end, after)
    return found


def _best_first(
    names: tuple[str, ...], warm: str, cold: Mapping[str, Objects]
) -> tuple[tuple[str, ...], tuple[ColdObject, ...]]:
    """``names`` in the order in which a restore reads them, and what has to be thawed at the first, as far as no other
    one gives it. ``warm``: where nothing has to be thawed; else the one of ``cold`` with the fewest bytes. Pure."""
    best = warm or min(cold, key=lambda name: sum(one.size for one in cold[name].values()), default="")
    if not best:
        return names, ()
    rest = [name for name in names if name != best]
    order = (best, *(name for name in rest if name not in cold), *(name for name in rest if name in cold))
    others = [objects for name, objects in cold.items() if name != best]
    return order, tuple(one for one in cold.get(best, {}).values() if all(one.key in other for other in others))


def _look(archive: ArchiveDestination, wants: Sequence[Want]) -> _Cold:
    from backupd.model.thaw import ColdObject
    from backupd.transfer.thaw import look

    states = look(archive, [want.key for want in wants])
    cold = _Cold()
    for want in wants:
        one = states.get(want.key)
        if one is None:
            continue  # it is missing; reading it will show it
        if one.state is ColdState.THAWED and one.until is not None:
            cold.until = min(filter(None, (cold.until, one.until)))
        elif one.state in (ColdState.ARCHIVED, ColdState.THAWING):
            cold.objects.append(
                ColdObject(
                    archive.name, want.key, want.size, one.storage_class, want.part, one.state is ColdState.THAWING
                )
            )
    return cold


def parts_of(chosen: Plan) -> tuple[str, ...]:
    """In the order in which a restore reads them."""
    from backupd.model.thaw import LOGS

    return (*chosen.chain, LOGS)
