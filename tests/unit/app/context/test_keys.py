"""Keys over months: real keys of gpg, a clock of ours."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.app.alerting.notifier import AlertNotifier, Pace
from backupd.app.context.keys import answer, challenge, findings, issue_due, keys
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import JobRun, Wiring
from backupd.catalog.session import open_catalog
from backupd.model.access import THIS_MACHINE
from backupd.model.errors import NotFoundError, RefusedError
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, JobRecord, JobState
from tests.support.keys import copy_public, gpg, make_home, make_key, stop_agent
from tests.support.stores.folders import short_directory

BEGIN = datetime.now(UTC).replace(microsecond=0)
_CONFIG = """
catalog: sqlite:///{base}/catalog.db
spool: {base}/spool
policies: {base}/policies
servers: {{shop-db1: {{socket: /nowhere.sock, policy: gold}}}}
destinations: {{local: {{type: filesystem, path: {base}/repository}}}}
encryption: {{gnupg_home: {base}/public, recipients: [ann@example.com, bank@example.com]{more}}}
"""


@dataclass
class Safe:
    """``ann`` holds her key elsewhere; the bank's lies in the restore keyring too, when ``restoring``."""

    base: Path
    wiring: Wiring
    now: datetime = BEGIN
    run: JobRun = field(
        default_factory=lambda: JobRun(
            JobRecord("20261121T042500Z-00000001", JobKind.CHALLENGE, "", JobState.RUNNING, BEGIN)
        )
    )

    def clock(self) -> datetime:
        return self.now

    def later(self, days: float) -> None:
        self.now += timedelta(days=days)

    def events(self) -> list[tuple[str, str]]:
        return [(event.kind, event.subject) for event in self.wiring.catalog.events.list()]

    def decrypt(self, file: Path, home: str = "ann") -> str:
        return gpg(self.base / home, "-d", str(file)).decode()


@pytest.fixture(scope="module")
def homes() -> Iterator[Path]:
    with short_directory("bt-safe-") as base:
        public = make_home(base / "public")
        for name in ("ann", "bank"):
            home = make_home(base / name)
            make_key(home, f"{name}@example.com")
            copy_public(home, public, f"{name}@example.com")
        (base / "policies").mkdir()
        (base / "policies/gold.yaml").write_text('physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\n')
        yield base
        for name in ("public", "ann", "bank"):
            stop_agent(base / name)


@pytest.fixture
def safe(homes: Path) -> Iterator[Safe]:
    yield from _safe(homes, restore="")


@pytest.fixture
def restoring(homes: Path) -> Iterator[Safe]:
    yield from _safe(homes, restore=f"restore: {{gnupg_home: {homes}/bank}}\n")


def _safe(base: Path, *, restore: str) -> Iterator[Safe]:
    (base / "backupd.yaml").write_text(_CONFIG.format(base=base, more="") + restore)
    settings = load_settings(base / "backupd.yaml")
    with open_catalog(settings.catalog) as catalog:
        made = Safe(base, Wiring(settings, catalog))
        made.wiring = Wiring(settings, catalog, clock=made.clock)
        yield made
    for path in base.glob("catalog.db*"):
        path.unlink()


def test_a_holder_proves_the_key_with_plain_gpg_and_the_phrase_is_stored_nowhere(safe: Safe) -> None:
    issued = challenge(safe.wiring)
    assert [one.name for one in issued] == ["ann@example.com", "bank@example.com"]
    mine = issued[0]
    assert mine.challenge is not None
    assert mine.file is not None
    assert mine.file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(subprocess.CalledProcessError):
        safe.decrypt(mine.file, "bank")
    phrase = safe.decrypt(mine.file)
    for path in safe.base.rglob("*"):
        if path.is_file() and not path.is_socket():
            assert phrase.strip().encode() not in path.read_bytes(), path
    with pytest.raises(RefusedError, match="wrong phrase for challenge"):
        answer(safe.wiring, mine.challenge.id, "0000-0000", "ann")
    safe.later(1)
    done = answer(safe.wiring, mine.challenge.id, phrase, "ann")
    assert (done.answered_at, done.answered_by) == (safe.now, "ann")
    assert not mine.file.exists()
    with pytest.raises(RefusedError, match="already answered"):
        answer(safe.wiring, mine.challenge.id, phrase, "bob")
    with pytest.raises(NotFoundError):
        answer(safe.wiring, "../../etc/passwd", phrase, "bob")
    ann, bank = keys(safe.wiring)
    assert (ann.proved_at, ann.proved_by, ann.waiting) == (safe.now, "ann", ())
    assert ann.due_at == safe.now + timedelta(days=90)
    assert (bank.proved_at, len(bank.waiting)) == (None, 1)
    with pytest.raises(NotFoundError, match="not a recipient"):
        challenge(safe.wiring, "eve@example.com")


def test_this_machine_answers_for_the_key_that_lies_on_it_and_says_so(restoring: Safe) -> None:
    ann, bank = challenge(restoring.wiring)
    assert ann.challenge is not None
    assert ann.challenge.answered_at is None
    assert bank.challenge is not None
    assert bank.challenge.answered_by == THIS_MACHINE
    assert [state.here for state in keys(restoring.wiring)] == [False, True]


def test_check_names_a_home_in_which_others_can_exchange_the_keys(safe: Safe) -> None:
    home = safe.wiring.settings.encryption.gnupg_home
    owner, mode = home.stat().st_uid, home.stat().st_mode & 0o777
    try:
        home.chmod(0o770)
        assert "can be written by others (mode 0770)" in findings(safe.wiring)[0].message
        home.chmod(0o700)
        os.chown(home, 12345, -1)
        (told,) = findings(safe.wiring)
        assert "belongs to another user (uid 12345)" in told.message
        assert told.hint.startswith(f"chown -R {os.geteuid()} {home} && chmod 700 {home}")
    finally:
        os.chown(home, owner, -1)
        home.chmod(mode)
    assert findings(safe.wiring) == []


def test_the_scheduled_job_asks_when_it_is_time_and_tells_once_a_week_of_silence(safe: Safe) -> None:
    wiring = safe.wiring
    assert len(issue_due(wiring, safe.run)) == 2
    assert issue_due(wiring, safe.run) == [], "both are being asked already"
    mine = next(one for one in wiring.catalog.challenges.list() if one.name.startswith("ann"))
    answer(wiring, mine.id, safe.decrypt(safe.base / f"spool/challenges/{mine.id}.asc"), "ann")
    safe.later(14)
    assert issue_due(wiring, safe.run) == []
    assert safe.events() == []
    assert findings(wiring) == []
    safe.later(1)
    issue_due(wiring, safe.run)
    bank = keys(wiring)[1].fingerprint
    assert safe.events() == [("key-overdue", bank)]
    found = findings(wiring)
    assert len(found) == 1
    assert "bank@example.com" in found[0].message
    assert "backupd keys answer" in found[0].hint
    safe.later(6)
    issue_due(wiring, safe.run)
    assert len(safe.events()) == 1
    safe.later(2)
    issue_due(wiring, safe.run)
    assert len(safe.events()) == 2
    safe.later(8)  # 31 days after what the bank was asked
    assert [one.name for one in issue_due(wiring, safe.run)] == ["bank@example.com"]
    assert keys(wiring)[1].overdue, "that it was asked again answers nothing"
    safe.later(60)  # 91 days after Ann's answer
    again = issue_due(wiring, safe.run)
    assert [one.name for one in again] == ["ann@example.com", "bank@example.com"]
    assert not keys(wiring)[0].overdue
    safe.later(14)
    assert keys(wiring)[0].overdue


def test_trouble_with_a_key_that_no_recipient_has_any_more_is_over_at_the_next_look(safe: Safe) -> None:
    wiring = safe.wiring
    ann = keys(wiring)[0].fingerprint
    with_mail = AlertNotifier(wiring, Pace(settle=0.0))
    with_mail.begin()
    for subject in (ann, "FORMER"):
        wiring.catalog.events.add(Event(safe.clock(), "key-overdue", Severity.ERROR, "not proved", subject=subject))
    with_mail.step()
    issue_due(wiring, safe.run)
    told = [(one.kind, one.subject) for one in wiring.catalog.events.list() if one.severity is Severity.INFO]
    assert sorted(told) == [("key-overdue-unwatched", "FORMER"), ("key-proved", ann)]
    with_mail.step()
    assert wiring.catalog.incidents.open() == ()


def test_an_old_challenge_proves_nothing_and_its_late_answer_begins_a_new_one(safe: Safe) -> None:
    wiring = safe.wiring
    old, _ = challenge(wiring)
    assert old.challenge is not None
    assert old.file is not None
    phrase = safe.decrypt(old.file)
    safe.later(31)
    ann = keys(wiring)[0]
    assert (ann.overdue, ann.waiting) == (True, ())
    assert "keys challenge --recipient ann@example.com" in findings(wiring)[0].hint
    with pytest.raises(RefusedError, match="wrong phrase for challenge"):
        answer(wiring, old.challenge.id, "0000-0000", "ann")
    assert not keys(wiring)[0].waiting
    with pytest.raises(RefusedError, match="30 days") as refused:
        answer(wiring, old.challenge.id, phrase, "ann")
    ann = keys(wiring)[0]
    assert (ann.overdue, ann.proved_at, len(ann.waiting)) == (True, None, 1)
    fresh = ann.waiting[0]
    assert f"a new one was issued: gpg -d {safe.base}/spool/challenges/{fresh.id}.asc" in refused.value.hint
    assert not old.file.exists()
    with pytest.raises(RefusedError) as refused:
        answer(wiring, old.challenge.id, phrase, "ann")
    assert f"another one waits: gpg -d {safe.base}/spool/challenges/{fresh.id}.asc" in refused.value.hint
    safe.later(1)
    answer(wiring, fresh.id, safe.decrypt(safe.base / f"spool/challenges/{fresh.id}.asc"), "ann")
    assert not keys(wiring)[0].overdue
    with pytest.raises(RefusedError) as refused:
        answer(wiring, old.challenge.id, phrase, "ann")
    assert "ann has proved the key since" in refused.value.hint
    assert not keys(wiring)[0].waiting


def test_keys_that_expire_or_have_are_events_and_the_others_are_still_asked(safe: Safe) -> None:
    home = make_home(safe.base / "brief")
    make_key(home, "brief@example.com", expires="20d")
    gpg(
        home,
        "--faked-system-time",
        "20200101T000000",
        "--quick-generate-key",
        "--passphrase",
        "",
        "old@example.com",
        "rsa2048",
        "encr",
        "20200201T000000",
    )
    public = safe.base / "public"
    for name in ("brief@example.com", "old@example.com"):
        copy_public(home, public, name)
    stop_agent(home)
    text = (safe.base / "backupd.yaml").read_text()
    (safe.base / "backupd.yaml").write_text(
        text.replace("bank@example.com", "brief@example.com, old@example.com, lost@example.com")
    )
    wiring = Wiring(load_settings(safe.base / "backupd.yaml"), safe.wiring.catalog, clock=safe.clock)
    issued = challenge(wiring)
    assert [(one.name.split("@")[0], one.challenge is not None) for one in issued] == [
        ("ann", True),
        ("brief", True),
        ("old", False),
        ("lost", False),
    ]
    assert "has expired on 2020-02-01" in issued[2].problem
    issue_due(wiring, safe.run)
    told = [(event.severity, event.message) for event in wiring.catalog.events.list(kind="key-expiring")]
    assert [severity for severity, _ in told].count(Severity.WARNING) == 1
    assert any("no public key for lost@example.com" in message for _, message in told)
    safe.later(21)
    issue_due(wiring, safe.run)
    brief = keys(wiring)[1]
    assert brief.info is not None
    assert "has expired" in (brief.info.problem or "")
