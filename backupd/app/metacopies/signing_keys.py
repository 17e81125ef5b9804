"""The key that signs what is stored: making the first one, and putting another one into the place of one that was
stolen or lost.

Signatures tell nothing of when they were made, for whoever has a key dates them as he likes. So a former key counts for
nothing any more, however old a document says that it is: all that this installation knows as its own is signed anew.
That is done twice. Before the configuration is changed the new signatures are put beside the former ones, so that the
running service and its restores believe all of it throughout; after it, what was signed with the former key meanwhile,
and then a head that tells up to which counter that key counted.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backupd.app.context.settings import Settings
from backupd.app.context.trust import prove_signing, signing, wanting
from backupd.app.context.wiring import Wiring, is_bare
from backupd.app.metacopies import signed_heads as heads
from backupd.app.metacopies.catalog_copies import write_copies
from backupd.app.metacopies.vouching import Vouched, vouch_anew
from backupd.model.errors import DestinationError, RefusedError, UsageError
from backupd.model.event import Event, Severity
from backupd.model.text import Clock, format_time
from backupd.transfer.records.authenticity import Retired, SignedDestination, Signing, make_key

ROTATED = "signing-key-rotated"
_PRINT = (
    "print the recovery page again and destroy the one before, which names a key that counts for nothing: "
    "backupd keys page"
)
_RELOAD = "let the service read it, where it runs: systemctl reload backupd"
_STOP = (
    "stop the service, where it runs: systemctl stop backupd (from the next step on what is stored already is not "
    "believed until it is signed)"
)
_START = "start the service again: systemctl start backupd"
_LOGS = (
    "binary logs, of which the catalog has no digest, are signed with --unproven: say it where you know that "
    "nobody else could write there; without it those stored until now count for nothing, and what follows them is "
    "not copied to further places"
)
_FINGERPRINT = re.compile(r"[0-9A-F]{40}|[0-9A-F]{64}")


@dataclass(frozen=True, slots=True)
class Made:
    """A new key in ``home``; ``steps``: what makes it count, in words."""

    key: str
    home: Path
    steps: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """As `keys make-signing --json` gives it."""
        return {"signing_key": self.key, "gnupg_home": str(self.home), "next": list(self.steps)}


def make_signing(wiring: Wiring) -> Made:
    """Raises RefusedError where one is named already, KeyUnusableError, ToolError."""
    settings = wiring.settings
    if (named := settings.encryption.signing_key) is not None:
        raise RefusedError(
            f"{settings.file} names a signing key already: {named}",
            hint="`backupd keys rotate-signing` replaces it",
        )
    key = _new(settings, wiring.clock)
    stored = sorted({copy.destination for one in wiring.catalog.backups.list() for copy in one.copies})
    off = sorted(
        {
            server.policy_name
            for name in settings.servers
            if (server := settings.server(name)).usable and server.policy.signed is False
        }
    )
    return Made(
        key,
        settings.encryption.gnupg_home,
        (
            *([_STOP] if stored else []),
            f"in {settings.file} add the line `signing_key: {key}` under `encryption:`",
            *(f"take `signed: false` out of policy {name}, if its servers are meant, too" for name in off),
            *(f"sign what is stored already: backupd catalog sign {name} ({_LOGS})" for name in stored),
            _START if stored else _RELOAD,
            "print the page that is kept away from the backups: backupd keys page",
        ),
    )


def _new(settings: Settings, clock: Clock) -> str:
    key = make_key(
        settings.encryption.gnupg_home, f"backupd signing {socket.gethostname()} {clock():%Y-%m-%dT%H:%M:%SZ}"
    )
    prove_signing(replace(signing(settings), key=key, trusted=(key,)))
    return key


@dataclass(frozen=True, slots=True)
class Rotation:
    """``former`` gives way to ``key``. ``finished``: the configuration names ``key`` already; then ``retired`` tells up
    to which counter of each server's head the former one counted. ``places``: what was signed anew where; ``silent``:
    destinations that did not answer, with why; ``steps``: what is to be done now."""

    former: str
    key: str
    finished: bool
    places: dict[str, Vouched]
    silent: dict[str, str]
    retired: dict[str, Retired]
    steps: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Did every destination answer, and was everything signed there?"""
        return not self.silent and not any(one.left for one in self.places.values())

    def as_json(self) -> dict[str, Any]:
        """As `keys rotate-signing --json` gives it."""
        return {
            "ok": self.ok,
            "former": self.former,
            "signing_key": self.key,
            "finished": self.finished,
            "places": {name: one.as_json() for name, one in self.places.items()},
            "silent": self.silent,
            "retired": {server: one.as_json() for server, one in self.retired.items()},
            "next": list(self.steps),
        }


def rotate_signing(
    wiring: Wiring,
    *,
    to: str | None = None,
    former: str | None = None,
    unproven: bool = False,
) -> Rotation:
    """Without ``former``: make a key, or take ``to``, and put its signatures beside those of the configured one. With
    it: the configuration names the new key, and ``former`` counts for nothing from now on.

    ``unproven``: also what the catalog has from a destination, and the former key vouches for. A destination that does
    not answer keeps nobody from the others. Raises RefusedError, UsageError, KeyUnusableError, CatalogError.
    """
    settings = wiring.settings
    named = settings.encryption.signing_key
    if named is None:
        raise RefusedError(
            "no signing key is named, so none can be replaced", hint="`backupd keys make-signing` makes the first one"
        )
    if not wanting(settings):
        raise RefusedError(
            "no policy is `signed`, so nothing was signed with it",
            hint=f"change encryption.signing_key in {settings.file}, or take `signed: false` out of the policies",
        )
    if is_bare(wiring.catalog):
        raise RefusedError(
            f"the catalog {wiring.catalog.name} knows no backup, so nothing tells what is ours from what a thief "
            "signed",
            hint="make it anew first, with the former key still named: backupd catalog rebuild --from DESTINATION",
        )
    if former is not None:
        return _finish(wiring, _fingerprint(former), unproven)
    key = _fingerprint(to) if to is not None else _new(settings, wiring.clock)
    if key == named:
        raise RefusedError(
            f"{key} signs already",
            hint="which key did it replace? Say so: backupd keys rotate-signing --from FINGERPRINT",
        )
    prove_signing(replace(signing(settings), key=key, trusted=(key,)))
    places, silent = _sign_anew(_by(wiring, key, without=named), named, unproven)
    trusted = ", and take that out of `trusted_signers`" if named in settings.encryption.trusted_signers else ""
    return Rotation(
        named,
        key,
        False,
        places,
        silent,
        {},
        (
            f"in {settings.file} write `signing_key: {key}` in the place of {named}{trusted}",
            _RELOAD,
            f"then finish it, so that the former key counts for nothing: backupd keys rotate-signing --from {named}",
        ),
    )


def _finish(wiring: Wiring, former: str, unproven: bool) -> Rotation:
    settings, now = wiring.settings, wiring.clock()
    ours = signing(settings)
    key = ours.key or ""
    if former == key:
        raise RefusedError(
            f"{former} is still the key that signs",
            hint=f"name the new one as encryption.signing_key in {settings.file} first; "
            "`backupd keys rotate-signing` makes one",
        )
    if former in ours.trusted:
        raise RefusedError(
            f"{former} still counts: encryption.trusted_signers names it",
            hint=f"take it out there, in {settings.file}, and let the service read it: systemctl reload backupd",
        )
    prove_signing(replace(signing(settings), key=key, trusted=(key,)))
    places, silent = _sign_anew(wiring, former, unproven)
    retired = heads.retire(wiring, former)
    if all(event.detail != former for event in wiring.catalog.events.list(kind=ROTATED)):
        wiring.catalog.events.add(
            Event(
                now,
                ROTATED,
                Severity.WARNING,
                f"{key} signs now; what only {former} has signed counts for nothing",
                subject=key,
                detail=former,
                hint=_PRINT,
            )
        )
    for one in write_copies(wiring, now=True):
        if one.problem:
            silent.setdefault(one.destination, one.problem)
    done = Rotation(former, key, True, places, silent, retired, (_PRINT,))
    again = f"once what is named above is resolved: backupd keys rotate-signing --from {former}"
    return done if done.ok else replace(done, steps=(again, *done.steps))


def _by(wiring: Wiring, key: str, *, without: str) -> Wiring:
    """The same installation as one whose configuration names ``key`` in the place of ``without``."""
    settings = wiring.settings
    encryption = settings.encryption.model_copy(
        update={
            "signing_key": key,
            "trusted_signers": tuple(one for one in settings.encryption.trusted_signers if one != without),
        }
    )
    configuration = settings.configuration.model_copy(update={"encryption": encryption})
    return Wiring(replace(settings, configuration=configuration), wiring.catalog, wiring.clock)


def _sign_anew(wiring: Wiring, former: str, unproven: bool) -> tuple[dict[str, Vouched], dict[str, str]]:
    """At every destination: what was signed, and which do not answer."""
    ours = signing(wiring.settings)
    believing = Signing(ours.home, None, (former,))
    silent = {name: error.message for name, error in wiring.unreachable().items()}
    usable = wiring.usable_destinations()
    for name in set(wiring.settings.destinations) - {place.name for place in usable}:
        if wiring.holds_backups(name):
            silent.setdefault(name, "its folder is empty or no repository: is its file system mounted?")
    places = {}
    for place in usable:
        try:
            places[place.name] = vouch_anew(wiring, place.name, believing, unproven=unproven)
            if isinstance(place, SignedDestination):
                heads.countersign(wiring, place)
        except DestinationError as error:
            silent[place.name] = error.message
    return places, silent


def _fingerprint(text: str) -> str:
    found = text.replace(" ", "").upper().removeprefix("0X")
    if not _FINGERPRINT.fullmatch(found):
        raise UsageError(f"{text} is no fingerprint of a key", hint="it has 40 or 64 hex digits: gpg --list-keys")
    return found


def replaced(wiring: Wiring) -> tuple[str, ...]:
    """Lines of the recovery page about keys that count for nothing any more."""
    return tuple(
        f"{event.detail} until {format_time(event.at)}"
        for event in wiring.catalog.events.list(kind=ROTATED)
        if event.subject == wiring.settings.encryption.signing_key
    )
