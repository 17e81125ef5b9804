"""Keys: who can open which backups, who has proved it lately, and challenges to prove it.

A challenge is a random phrase that is sealed for one key alone. Whoever answers with the phrase holds the key, and its
passphrase, today; a backup that nobody can open is none. Which backups depend on which key, their manifests say.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import EXPIRING, OVERDUE, kinds_of
from backupd.app.context.incidents import Incidents
from backupd.app.context.wiring import JobRun, Wiring, gathered
from backupd.backup.finding import Finding, warning
from backupd.model.access import THIS_MACHINE, VALID_FOR, Challenge
from backupd.model.backup_record import BackupRecord, BackupState
from backupd.model.document import Document, json_key
from backupd.model.errors import BackupdError, KeyUnusableError, RefusedError, UnknownNameError, unknown
from backupd.model.event import Severity
from backupd.model.manifest import Header
from backupd.model.text import few, format_time, is_id, new_id
from backupd.transfer.records.keyring import (
    KeyInfo,
    digest_of,
    matches,
    new_phrase,
    open_phrase,
    resolve_recipients,
    seal_phrase,
    secret_fingerprints,
)
from backupd.transfer.records.manifests import load_header
from policies.document import suggestion

_NAMED = 20


@dataclass(frozen=True, slots=True)
class Dependence:
    """``total``: backups that a key opens; ``alone``: those of them that no other key opens."""

    total: int
    alone: int


def dependence(wiring: Wiring) -> dict[str, Dependence]:
    """By fingerprint. Reads one manifest of each backup; those that cannot be read are not counted."""
    found: dict[str, Dependence] = {}
    for header in _headers(wiring):
        for fingerprint in header.recipients:
            before = found.get(fingerprint, Dependence(0, 0))
            found[fingerprint] = Dependence(before.total + 1, before.alone + (len(header.recipients) == 1))
    return found


def require_keys(wiring: Wiring, server: str, backup_ids: Sequence[str]) -> None:
    """Raises KeyUnusableError unless the restore keyring opens each of these backups: before anything is fetched, and
    with the names of all that the missing keys are needed for."""
    home = wiring.settings.needs_restore().gnupg_home
    here = secret_fingerprints(home)
    closed = [header for header in _headers(wiring, server, backup_ids) if not here & set(header.recipients)]
    if not closed:
        return
    missing = {fingerprint for header in closed for fingerprint in header.recipients}
    needing = sorted(
        header.backup_id
        for header in _headers(wiring)
        if missing & set(header.recipients) and not here & set(header.recipients)
    )
    shown = few(needing, _NAMED)
    raise KeyUnusableError(
        f"{', '.join(header.backup_id for header in closed)} cannot be opened here: it is sealed for "
        f"{', '.join(sorted(missing))}, and no secret key of these is in {home}",
        detail=f"backups that need one of these keys: {shown}",
        hint=f"import the old secret key, too: gpg --homedir {home} --import FILE",
    )


def _headers(wiring: Wiring, server: str | None = None, backup_ids: Sequence[str] | None = None) -> Iterator[Header]:
    backups = wiring.catalog.backups
    if backup_ids is not None:
        named = [one for one in backups.by_ids(backup_ids) if not one.foreign and server in (None, one.server)]
        records: Iterable[BackupRecord] = sorted(named, key=lambda one: (one.finished_at, one.id), reverse=True)
    else:
        everything = backups.every() if server is None else backups.list(server)
        records = (record for record in everything if record.state is not BackupState.DELETED)
    for record in records:
        for copy in record.copies:
            try:
                yield load_header(wiring.destination(copy.destination), record.server, record.id)
            except BackupdError:
                continue  # another copy may be readable; verify and fsck report this one
            break


ANSWER_WITHIN = timedelta(days=14)
"""How long the holder of a key may take to answer."""
_SAID_AGAIN = timedelta(days=7)
"""How long after an event the same one is reported once more."""


@dataclass(frozen=True, slots=True)
class KeyState:
    """One key: a configured recipient (``info``), or one that only older backups are sealed for (``info`` None).

    ``proved_at``, ``proved_by``: the newest answer. ``due_at``: when the next one is wanted; None for a key that
    was never asked. ``waiting``: challenges that can still be answered, the newest first. ``here``: its secret half is
    in the restore keyring.
    """

    fingerprint: str
    info: KeyInfo | None
    proved_at: datetime | None
    proved_by: str
    due_at: datetime | None
    overdue: bool
    waiting: tuple[Challenge, ...]
    here: bool
    backups: Dependence

    @property
    def name(self) -> str:
        """As the configuration has it; the fingerprint of a key that is no recipient any more."""
        return self.info.name if self.info else self.fingerprint

    def as_json(self) -> dict[str, Any]:
        """One key of `backupd keys --json`; times are RFC 3339 in UTC or None."""
        info = self.info
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "configured": info is not None,
            "user_ids": list(info.user_ids) if info else [],
            "expires_at": _time(info.expires_at if info else None),
            "problem": info.problem if info else None,
            "warning": info.warning if info else None,
            "proved_at": _time(self.proved_at),
            "proved_by": self.proved_by,
            "due_at": _time(self.due_at),
            "overdue": self.overdue,
            "open_challenge": self.waiting[0].id if self.waiting else None,
            "secret_here": self.here,
            "backups": self.backups.total,
            "only_this_key": self.backups.alone,
        }


@dataclass(frozen=True, slots=True)
class Issued(Document):
    """``challenge`` None: nothing could be sealed for that key, and ``problem`` says why. ``armored``: what its holder
    has to decrypt, also in ``file`` until it is answered."""

    name: str
    fingerprint: str
    challenge: Challenge | None
    file: Path | None = None
    armored: str = field(default="", metadata=json_key("message"))
    problem: str = ""


def keys(wiring: Wiring, *, with_backups: bool = True) -> list[KeyState]:
    """Every configured key, and every other that backups still depend on. Reads the header of each backup, unless
    ``with_backups`` is False. Raises KeyUnusableError, ToolError for a keyring that cannot be read."""
    now = wiring.clock()
    infos = _infos(wiring)
    sealed = dependence(wiring) if with_backups else {}
    here = _secrets(wiring)
    asked = gathered((challenge.fingerprint, challenge) for challenge in wiring.catalog.challenges.list())
    found: list[tuple[str, KeyInfo | None]] = [(info.fingerprint, info) for info in infos]
    found += [(fingerprint, None) for fingerprint in sorted(set(sealed) - {info.fingerprint for info in infos})]
    return [_state(name, info, asked.get(name, ()), wiring, now, here, sealed) for name, info in found]


def challenge(wiring: Wiring, recipient: str | None = None) -> list[Issued]:
    """Ask every configured key, or ``recipient`` (its name in the configuration or its fingerprint).

    A key that this machine itself can use is answered at once. Raises NotFoundError.
    """
    infos = _infos(wiring)
    if recipient is not None:
        infos = [info for info in infos if recipient in (info.name, info.fingerprint)]
        if not infos:
            names = [info.name for info in _infos(wiring)]
            raise UnknownNameError(
                f"{recipient} is not a recipient of this configuration{suggestion(recipient, names)}",
                hint="`backupd keys` lists them",
            )
    here = _secrets(wiring)
    return [_issue(wiring, info, here) for info in infos]


def answer(wiring: Wiring, challenge_id: str, phrase: str, by: str) -> Challenge:
    """Record that ``by`` gave the phrase. Raises NotFoundError, RefusedError for a wrong phrase or a second answer,
    and for a challenge that has lapsed; then a new one waits."""
    asked = wiring.catalog.challenges.get(challenge_id)
    if not matches(phrase, asked.digest):
        raise RefusedError(
            f"wrong phrase for challenge {challenge_id}",
            hint=f"the phrase is the output of gpg -d {_file(wiring, challenge_id)} with the key {asked.name}",
        )
    if asked.answered_at is None and asked.has_lapsed(wiring.clock()):
        raise _lapsed(wiring, asked)
    wiring.catalog.challenges.answer(challenge_id, wiring.clock(), by)
    _report_proved(wiring, asked.fingerprint, f"{by} has proved the key of {asked.name}")
    for one in wiring.catalog.challenges.list(asked.fingerprint):
        _file(wiring, one.id).unlink(missing_ok=True)
    return wiring.catalog.challenges.get(challenge_id)


def issue_due(wiring: Wiring, run: JobRun) -> list[Issued]:
    """Ask the keys whose time has come and that are not being asked already; report those that are overdue or expire.

    Gives what was issued. A key that cannot be used is an event, not a failure.
    """
    issued = []
    looked: set[Key] = set()
    for state in keys(wiring, with_backups=False):
        run.check()
        info = state.info
        if info is None:
            continue
        expiring, overdue = (
            Key(EXPIRING, subject=info.fingerprint or info.name),
            Key(OVERDUE, subject=state.fingerprint),
        )
        looked |= {expiring, overdue}
        if info.problem or info.warning:
            severity = Severity.ERROR if info.problem else Severity.WARNING
            hint = "backups fail when nothing can be sealed for one of their keys"
            _report(wiring, Condition(expiring, severity, info.problem or info.warning or "", hint=hint))
        else:
            wiring.settle(looked={expiring: f"the key of {info.name} no longer expires soon"})
        if state.overdue:
            _report(wiring, Condition(overdue, Severity.ERROR, _overdue(state), hint=_how(wiring, state)))
        else:
            _report_proved(wiring, state.fingerprint, f"the key of {info.name} was proved")
        wanted = state.due_at is None or state.due_at <= wiring.clock()
        if wanted and not state.waiting and not info.problem:
            run.fence()
            issued += challenge(wiring, info.fingerprint)
    _close_former(wiring, looked)
    return issued


def _close_former(wiring: Wiring, looked: Collection[Key]) -> None:
    """Incidents about keys that no recipient of the configuration has any more."""
    known = [Key(kind, subject=one.subject) for one in wiring.catalog.incidents.open() for kind in kinds_of(one)]
    gone = {
        key: f"no recipient of this configuration has the key {key.subject} any more"
        for key in known
        if key.kind in (EXPIRING, OVERDUE) and key not in looked
    }
    Incidents(wiring.catalog).settle(wiring.clock(), gone=gone)


def _report_proved(wiring: Wiring, fingerprint: str, message: str) -> None:
    """Unless nobody missed it."""
    wiring.settle(looked={Key(OVERDUE, subject=fingerprint): message})


def _lapsed(wiring: Wiring, asked: Challenge) -> RefusedError:
    """Why an answer to ``asked`` does not count; sees to it that there is a challenge whose answer does."""
    state = next((one for one in keys(wiring, with_backups=False) if one.fingerprint == asked.fingerprint), None)
    if state is None:
        hint = f"no recipient of this configuration has the key {asked.fingerprint} any more"
    elif state.waiting:
        hint = f"another one waits: {_how(wiring, state)}"
    elif state.proved_at and state.proved_at > asked.issued_at:
        hint = f"no action is needed: {state.proved_by} has proved the key since, on {state.proved_at:%Y-%m-%d}"
    else:
        new = challenge(wiring, asked.fingerprint)[0]
        if new.challenge is None:
            hint = f"no new one could be sealed: {new.problem}"
        elif new.challenge.answered_at:
            hint = "this machine has answered a new one, for its own copy of the key"
        else:
            hint = f"a new one was issued: {_open_with(wiring, new.challenge.id)}"
    return RefusedError(
        f"challenge {asked.id} is of {asked.issued_at:%Y-%m-%d}: an answer counts for {VALID_FOR.days} days", hint=hint
    )


def findings(wiring: Wiring) -> list[Finding]:
    """What `backupd check` says about challenges, and about who may exchange the keys. That a keyring cannot be read
    is reported by preflight."""
    homes = [wiring.settings.encryption.gnupg_home]
    homes += [wiring.settings.restore.gnupg_home] if wiring.settings.restore else []
    found = [one for home in dict.fromkeys(homes) for one in _home(home)]
    try:
        states = keys(wiring, with_backups=False)
    except BackupdError:
        return found
    return [*found, *(warning("keys", _overdue(state), _how(wiring, state)) for state in states if state.overdue)]


def _home(home: Path) -> Iterator[Finding]:
    """Whoever writes there says for whom backups are sealed, and whose signatures are believed."""
    with suppress(OSError):
        status = home.stat()
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid not in (0, os.geteuid()):
            yield warning(
                "keys",
                f"{home} belongs to another user (uid {status.st_uid}), who can replace its keys",
                f"chown -R {os.geteuid()} {home} && chmod 700 {home}; then compare the fingerprints: gpg "
                f"--homedir {home} --list-keys",
            )
        elif mode & (stat.S_IWGRP | stat.S_IWOTH):
            yield warning(
                "keys",
                f"{home} can be written by others (mode {mode:04o}), who can replace its keys",
                f"chmod 700 {home}; then compare the fingerprints: gpg --homedir {home} --list-keys",
            )


def _state(
    fingerprint: str,
    info: KeyInfo | None,
    asked: Sequence[Challenge],
    wiring: Wiring,
    now: datetime,
    here: frozenset[str],
    sealed: Mapping[str, Dependence],
) -> KeyState:
    answered = max((one for one in asked if one.answered_at), key=lambda one: one.answered_at or now, default=None)
    proved_at = answered.answered_at if answered else None
    since = [one for one in asked if one.answered_at is None and (not proved_at or one.issued_at > proved_at)]
    every = wiring.settings.encryption.challenge
    due_at = proved_at + every if proved_at else since[-1].issued_at if since else None
    late = bool(since) and since[-1].issued_at + ANSWER_WITHIN < now
    late = late or (proved_at is not None and proved_at + every + ANSWER_WITHIN < now)
    return KeyState(
        fingerprint,
        info,
        proved_at,
        answered.answered_by if answered else "",
        due_at,
        overdue=late and info is not None,
        waiting=tuple(one for one in since if not one.has_lapsed(now)),
        here=fingerprint in here,
        backups=sealed.get(fingerprint, Dependence(0, 0)),
    )


def _issue(wiring: Wiring, info: KeyInfo, here: Iterable[str]) -> Issued:
    if info.problem:
        return Issued(info.name, info.fingerprint, None, problem=info.problem)
    phrase = new_phrase()
    try:
        armored = seal_phrase(phrase, info.fingerprint, wiring.settings.encryption.gnupg_home)
    except KeyUnusableError as error:
        return Issued(info.name, info.fingerprint, None, problem=f"{error.message}: {error.detail}")
    now = wiring.clock()
    asked = Challenge(new_id(now), info.fingerprint, info.name, now, digest_of(phrase))
    file = _file(wiring, asked.id)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_text(armored, encoding="ascii")
        for one in wiring.catalog.challenges.list(info.fingerprint):
            if one.has_lapsed(now):
                _file(wiring, one.id).unlink(missing_ok=True)
    except OSError as error:
        raise RefusedError(
            f"the challenge cannot be written to {file}: {error.strerror}", hint="see spool: in the configuration"
        ) from error
    wiring.catalog.challenges.add(asked)
    problem = ""
    if info.fingerprint in here:
        try:
            opened = _open_here(wiring, armored)
        except KeyUnusableError as error:
            problem = f"its secret key is on this machine and does not work: {error.message}"
        else:
            return Issued(info.name, info.fingerprint, answer(wiring, asked.id, opened, THIS_MACHINE), None, armored)
    return Issued(info.name, info.fingerprint, asked, file, armored, problem)


def _open_here(wiring: Wiring, armored: str) -> str:
    restore = wiring.settings.needs_restore()
    return open_phrase(armored, restore.gnupg_home, restore.passphrase_file)


def _infos(wiring: Wiring) -> list[KeyInfo]:
    encryption = wiring.settings.encryption
    return resolve_recipients(encryption.gnupg_home, encryption.recipients, now=wiring.clock())


def _secrets(wiring: Wiring) -> frozenset[str]:
    """Whose secret keys are in the restore keyring; a machine that only takes backups has none."""
    restore = wiring.settings.restore
    if restore is None or not restore.gnupg_home.is_dir():
        return frozenset()
    return secret_fingerprints(restore.gnupg_home)


def _file(wiring: Wiring, challenge_id: str) -> Path:
    if not is_id(challenge_id):
        raise unknown("challenge", challenge_id, lists="keys", what="the open ones")
    return wiring.settings.spool / "challenges" / f"{challenge_id}.asc"


def _report(wiring: Wiring, condition: Condition) -> None:
    """Unless it was reported in the last days."""
    event = condition.event(wiring.clock())
    for before in wiring.catalog.events.list(kind=event.kind):
        if before.at < event.at - _SAID_AGAIN:
            break
        if before.subject == event.subject and before.severity is event.severity:
            return
    wiring.catalog.events.add(event)


def _overdue(state: KeyState) -> str:
    last = f"last proved {state.proved_at:%Y-%m-%d} by {state.proved_by}" if state.proved_at else "never proved"
    return f"no recent proof that the key of {state.name} still opens backups ({last})"


def _how(wiring: Wiring, state: KeyState) -> str:
    if not state.waiting:
        return f"backupd keys challenge --recipient {state.name}"
    return _open_with(wiring, state.waiting[0].id)


def _open_with(wiring: Wiring, challenge_id: str) -> str:
    return f"gpg -d {_file(wiring, challenge_id)} where the key is, then: backupd keys answer {challenge_id}"


def _time(moment: datetime | None) -> str | None:
    return format_time(moment) if moment else None
