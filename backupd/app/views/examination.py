"""`backupd fsck`: what the destinations hold and the catalog says, and what the catalog keeps of each server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from backupd.app.context.wiring import Wiring
from backupd.app.verify import verification
from backupd.app.verify.verification import FsckOutcome
from backupd.app.views.standings import Bases, look, read, seen
from backupd.catalog.tables.backups import Amounts
from backupd.model.errors import BackupdError, CatalogError
from backupd.transfer.fsck import Finding, Invariant


def fsck(wiring: Wiring, *, mend: bool) -> FsckOutcome:
    """As ``verification.fsck``; then what is kept of each server is compared with the rows that it was made of. Raises
    CatalogError."""
    outcome = verification.fsck(wiring, mend=mend)
    found = [("", finding) for finding in examined(wiring, mend=mend)]
    if mend:
        return replace(outcome, repaired=(*outcome.repaired, *found))
    return replace(outcome, findings=(*outcome.findings, *found))


def examined(wiring: Wiring, *, mend: bool) -> list[Finding]:
    """What is kept of servers and is not what their rows say; ``mend``: it is made anew. Raises CatalogError."""
    found = []
    for name in wiring.catalog.standings.servers():
        if name in wiring.settings.servers and (more := _more(wiring, name)):
            text = f"{name}: the stored status says {more}"
            found.append(Finding(Invariant.STANDING_MATCHES_ROWS, name, text, repairable=True))
            if mend:
                look(wiring, name, wiring.clock())
        kept, counted = wiring.catalog.backups.stock(name)
        if {destination: amounts for destination, amounts in kept.items() if amounts[0]} != counted:
            text = (
                f"{name}: the stored totals are {_stock(kept)}; the copies of its backups add up to {_stock(counted)}"
            )
            found.append(Finding(Invariant.STOCK_MATCHES_COPIES, name, text, repairable=True))
            if mend:
                wiring.catalog.backups.recount(name)
    return found


def _stock(found: Mapping[str, Amounts]) -> str:
    totals = (f"{count} at {name} ({new} B new, {most} B the largest)" for name, (count, new, most) in found.items())
    return ", ".join(sorted(totals)) or "none"


def _more(wiring: Wiring, name: str) -> str:
    """What the row of a server says that a look does not find. Nothing of a row that is behind, which says so, nor of
    one whose server changes meanwhile; and a row may well say less."""
    standings, now = wiring.catalog.standings, wiring.clock()
    rows, confirmed = standings.rows([name])
    documents = standings.documents([name])
    kept = read(documents[name]) if name in rows and name in documents else None
    if kept is None or kept.trouble:
        return ""
    status = Bases(wiring).status(rows[name], kept, confirmed.get(name, {}), now)
    try:
        fresh = seen(wiring, name)
    except CatalogError:
        raise
    except BackupdError:
        return ""
    if status.behind or standings.count(name) != rows[name].made:
        return ""
    stored = status.found
    alone = {one.name: one.latest for one in fresh.reach}
    pairs = (
        ("recoverable until", stored.latest, fresh.latest, _is_after(stored.latest, fresh.latest)),
        ("recoverable from", stored.first, fresh.first, _is_after(fresh.first, stored.first)),
        *(
            (
                f"{one.name} alone recoverable until",
                one.latest,
                alone.get(one.name),
                _is_after(one.latest, alone.get(one.name)),
            )
            for one in stored.reach
        ),
        ("complete backups:", stored.backups, fresh.backups, stored.backups != fresh.backups),
        ("protected backups:", stored.protected, fresh.protected, stored.protected != fresh.protected),
        ("stored bytes:", stored.bytes_stored, fresh.bytes_stored, stored.bytes_stored != fresh.bytes_stored),
    )
    return "; ".join(f"{what} {one} instead of {other}" for what, one, other, differs in pairs if differs)


def _is_after(one: datetime | None, other: datetime | None) -> bool:
    return one is not None and (other is None or one > other)
