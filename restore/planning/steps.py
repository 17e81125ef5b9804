"""The steps of a plan: what each works on, and how long it will take by the rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from backupd.model.backup_record import BackupRecord
from backupd.model.binlog import ReplayMethod, ReplaySpec
from backupd.model.text import format_size
from backupd.model.thaw import ThawPlan
from restore.planning.plan import Rate, Step, bytes_of, replay_rate


def steps(
    chain: Sequence[BackupRecord],
    destinations: Sequence[str],
    rates: Mapping[str, Rate],
    *,
    datadir: Path | None = None,
    start: bool = False,
    verify: bool = False,
    commands: Mapping[str, tuple[str, ...]] | None = None,
    replay: ReplaySpec | None = None,
) -> tuple[Step, ...]:
    """``rates``: of every phase."""
    source = sum(b.stats.bytes_source for b in chain)
    stored = sum(b.stats.bytes_stored for b in chain)
    files = sum(b.stats.files for b in chain)
    several = f" of {len(chain)} backups" if len(chain) > 1 else ""
    titles = {
        "fetched": f"fetch {format_size(stored)} from {destinations[0]}, unseal to {format_size(source)} "
        f"in {files} files{several}",
        "prepared": "prepare: apply redo" + (f", then {_increments(chain)} in order" if len(chain) > 1 else ""),
        "restored": f"put the files in place: {datadir or 'a throw-away directory'}",
        "started": "start the server, socket only",
        "rolled_forward": replay_text(replay) if replay is not None else "",
        "verified": "check every table, run the checks, compare with the witness",
    }
    wanted = {"started": start, "rolled_forward": replay is not None, "verified": verify}
    sizes = [b.stats.bytes_source for b in chain]
    found = []
    for name, title in titles.items():
        if not wanted.get(name, True):
            continue
        rate, size = rates[name], bytes_of(name, sizes)
        if name == "rolled_forward" and replay is not None:
            rate, size = replay_rate(replay, rates), replay.size
        found.append(Step(name, title, size, rate.estimate(size), rate.basis, (commands or {}).get(name, ())))
    return tuple(found)


def _increments(chain: Sequence[BackupRecord]) -> str:
    count = len(chain) - 1
    return f"{count} increment{'s' if count != 1 else ''} ({format_size(sum(b.stats.bytes_source for b in chain[1:]))})"


def replay_text(replay: ReplaySpec) -> str:
    """What is replayed, how, and up to where, in words."""
    stop = replay.stop
    across = f" in {len(replay.legs)} parts, across a fork" if len(replay.legs) > 1 else ""
    how = "by the server's applier" if replay.method is ReplayMethod.APPLIER else "through a client"
    without = f", without {', '.join(replay.exclude)}" if replay.exclude else ""
    what = f"{format_size(replay.size)} of binary logs, {replay.transactions} transactions"
    return f"replay {what}{across}, {how}, up to {stop.file}:{stop.pos}{without}"


def thaw_step(thaw: ThawPlan) -> Step:
    """Waiting for an archive. What is there first is fetched meanwhile, so this is an upper bound. Raises RefusedError
    for a tier that there is not."""
    offer = thaw.offer
    count = len(thaw.objects)
    return Step(
        "thawed",
        f"wait until {count} archived object{'s' if count != 1 else ''} at {thaw.places} can be read ({offer.tier})",
        thaw.bytes,
        offer.hours * 3600,
        f"at most {offer.hours:g} h by the table of {thaw.prices.dated.isoformat()}",
    )
