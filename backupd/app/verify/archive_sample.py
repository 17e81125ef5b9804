"""What lies in an archive class cannot be read in rotation; a sample of it is thawed now and then, and read.

Which one is under way stands in the catalog's events. Asking is paid for, so one that is being thawed is not asked for
again, and the cheapest tier is taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from datetime import timedelta

from backupd.app.context.incidents import Pair
from backupd.app.context.wiring import Wiring
from backupd.model.errors import BackupdError, ObjectMissingError
from backupd.model.event import Event, Severity
from backupd.model.text import format_size
from backupd.model.thaw import TIERS
from backupd.process.throttle import Unlimited
from backupd.transfer.thaw import ask
from storage.contract.destination import ArchiveDestination, ColdState, Destination, Tier, as_archive

SAMPLE = Pair("cold-sample-thawing", "cold-sample-read")
_YEAR = timedelta(days=365)


def pending(wiring: Wiring, destination: Destination, server: str) -> str | None:
    """The key of the sample that was asked for and not read yet."""
    last = wiring.catalog.events.last(server, (SAMPLE.broken, SAMPLE.mended), destination.name)
    return last.detail if last is not None and last.kind == SAMPLE.broken else None


def sample(
    wiring: Wiring,
    destination: Destination,
    server: str,
    key: str | None,
    cold: Collection[str],
    wrong: Collection[str],
) -> str:
    """Go on with the sample ``key`` (see ``pending``) after a run, or ask for one where it is time; what to say of it,
    if anything. ``cold``: keys that this run could not read; ``wrong``: those that it found damaged."""
    archive = as_archive(destination)
    if archive is None:
        return ""
    try:
        if key is None:
            return _begin(wiring, archive, server, cold)
        state = archive.coldness(key).state
    except ObjectMissingError:
        return _end(wiring, archive, server, key or "", "was removed before it could be read")
    if key in cold and state is not ColdState.THAWING:
        return _ask(wiring, archive, server, key)  # it went cold again before anybody read it
    if key in cold:
        return f"{destination.name}: {key} is being thawed, to be read as a sample"
    return _end(wiring, archive, server, key, "is damaged" if key in wrong else "was read, and is as it was stored")


def _begin(wiring: Wiring, archive: ArchiveDestination, server: str, cold: Collection[str]) -> str:
    policy = wiring.settings.server(server).policy if server in wiring.settings.servers else None
    count = policy.verify.cold_sample if policy is not None and policy.verify is not None else 0
    if not count or not cold:
        return ""
    last = wiring.catalog.events.last(server, (SAMPLE.broken, SAMPLE.mended), archive.name)
    if last is not None and wiring.clock() - last.at < _YEAR / count:
        return ""
    salt = f"{wiring.clock():%Y%m%d}"
    return _ask(wiring, archive, server, min(cold, key=lambda one: hashlib.sha256(f"{salt} {one}".encode()).digest()))


def _ask(wiring: Wiring, archive: ArchiveDestination, server: str, key: str) -> str:
    settings = wiring.settings.configuration.archive
    prices = settings.prices.as_prices()
    found = archive.coldness(key)
    known = prices.retrieval.get(found.storage_class, {})
    tier = next((one for one in TIERS if one in known), settings.tier)
    problem = ""
    try:
        for batch in ask(archive, [key], Tier(tier), settings.days, now=wiring.clock(), pace=Unlimited()):
            problem = batch[0].problem
    except BackupdError as error:
        problem = error.message
    if problem:
        return f"{archive.name}: {key} could not be thawed as a sample: {problem}"
    cost = prices.cost(found.storage_class, tier, 1, found.size, settings.days)
    price = "" if cost is None else f", about {cost:.4f} {prices.currency}"
    text = (
        f"{archive.name}: {key} ({format_size(found.size)}) is thawed at the tier {tier}{price}, to be read as a sample"
    )
    wiring.catalog.events.add(
        Event(wiring.clock(), SAMPLE.broken, Severity.INFO, text, server=server, subject=archive.name, detail=key)
    )
    return text


def _end(wiring: Wiring, archive: ArchiveDestination, server: str, key: str, what: str) -> str:
    text = f"{archive.name}: {key}, thawed as a sample, {what}"
    wiring.catalog.events.add(
        Event(wiring.clock(), SAMPLE.mended, Severity.INFO, text, server=server, subject=archive.name, detail=key)
    )
    return text
