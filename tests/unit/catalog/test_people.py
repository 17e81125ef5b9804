"""Tokens, sessions, challenges, the audit, and requests that are sent twice."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import delete, text, update

from backupd.catalog.database import Database
from backupd.catalog.people import audit
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.access import AuditEntry, Challenge, Role, Session, Token
from backupd.model.errors import CatalogError, NotFoundError, RefusedError

NOW = datetime(2026, 11, 21, 9, 41, 3, 250, tzinfo=UTC)
TOKEN = Token(
    "t1", "grafana", Role.VIEWER, "0" * 64, NOW, "root", NOW + timedelta(days=1), servers=frozenset({"db2", "db1"})
)
ENTRY = AuditEntry(
    NOW, "eva", "admin", "api", "backup-deleted", "db1", "b1", "done", "with increments", address="192.0.2.7"
)


def test_a_token_is_found_by_its_digest_and_counts_until_it_is_revoked(catalog: Catalog) -> None:
    catalog.tokens.add(TOKEN)
    assert catalog.tokens.find(TOKEN.digest) == TOKEN
    assert catalog.tokens.find("1" * 64) is None
    gone = catalog.tokens.revoke("t1", NOW, "eva")
    assert (gone.revoked_at, gone.revoked_by, gone.is_valid(NOW)) == (NOW, "eva", False)
    assert catalog.tokens.revoke("t1", NOW + timedelta(1), "otto") == gone
    assert catalog.tokens.list() == (gone,)
    with pytest.raises(NotFoundError):
        catalog.tokens.revoke("t2", NOW, "eva")


def test_no_two_tokens_that_let_in_have_the_same_name(catalog: Catalog) -> None:
    catalog.tokens.add(TOKEN)
    other = replace(TOKEN, id="t2", name="Grafana", digest="1" * 64, created_at=NOW + timedelta(hours=1))
    with pytest.raises(RefusedError, match="t1"):
        catalog.tokens.add(other)
    later = replace(other, id="t3", digest="2" * 64, created_at=NOW + timedelta(days=1), expires_at=None)
    catalog.tokens.add(later)  # by then the first one has expired
    with pytest.raises(RefusedError, match="t3"):
        catalog.tokens.add(replace(later, id="t4", digest="3" * 64))
    catalog.tokens.revoke("t3", NOW, "eva")
    catalog.tokens.add(replace(later, id="t4", digest="3" * 64))


def test_the_last_use_of_a_token_is_not_written_for_each_request(catalog: Catalog) -> None:
    catalog.tokens.add(TOKEN)
    for seconds in (0, 10, 299):
        catalog.tokens.used("t1", NOW + timedelta(seconds=seconds))
    assert catalog.tokens.get("t1").last_used_at == NOW
    catalog.tokens.used("t1", NOW + timedelta(seconds=301))
    assert catalog.tokens.get("t1").last_used_at == NOW + timedelta(seconds=301)


def test_a_session_ends_with_its_time_and_with_its_token(catalog: Catalog) -> None:
    catalog.tokens.add(TOKEN)
    session = Session("a" * 64, "t1", "word", NOW, NOW + timedelta(hours=1), "192.0.2.7")
    catalog.sessions.add(session)
    assert catalog.sessions.find("a" * 64, NOW) == session
    assert catalog.sessions.find("a" * 64, NOW + timedelta(hours=1)) is None
    catalog.tokens.revoke("t1", NOW, "eva")
    assert catalog.sessions.find("a" * 64, NOW) is None


def test_a_login_sweeps_away_sessions_that_have_expired(catalog: Catalog) -> None:
    old = Session("a" * 64, "t1", "word", NOW, NOW + timedelta(hours=1), "")
    catalog.sessions.add(old)
    catalog.sessions.add(
        replace(old, digest="b" * 64, created_at=NOW + timedelta(hours=2), expires_at=NOW + timedelta(hours=3))
    )
    assert catalog.sessions.find("a" * 64, NOW) is None


def test_each_entry_of_the_audit_follows_from_the_one_before(catalog: Catalog) -> None:
    first, second = catalog.audit.add(ENTRY), catalog.audit.add(ENTRY)
    assert (first.number, second.number) == (1, 2)
    assert first.digest != second.digest
    assert catalog.audit.list() == (second, first)
    verified = catalog.audit.verify()
    assert (verified.entries, verified.digest, verified.problems) == (2, second.digest, ())
    assert catalog.audit.list(before=2) == catalog.audit.list(limit=5)[1:]
    assert catalog.audit.list(actor="nobody") == ()


def test_what_a_database_cannot_hold_neither_loses_an_entry_nor_breaks_the_chain(catalog: Catalog) -> None:
    written = catalog.audit.add(replace(ENTRY, detail="a\x00b\udcff", server="x" * 100))
    assert catalog.audit.list() == (written,)
    assert catalog.audit.verify().problems == ()


def test_the_audit_lets_nobody_change_or_remove_an_entry(catalog: Catalog) -> None:
    catalog.audit.add(ENTRY)
    for statement in (update(audit).values(actor="nobody"), delete(audit)):
        with (
            pytest.raises(CatalogError, match=r"refused a statement|failed") as caught,
            catalog.database.write() as connection,
        ):
            connection.execute(statement)
        assert "only added to" in caught.value.detail
    if not catalog.database.sqlite:
        with pytest.raises(CatalogError), catalog.database.write() as connection:
            connection.execute(text("TRUNCATE audit"))
    assert catalog.audit.list()[0].actor == "eva"


def _without_triggers(database: Database, statement: str) -> None:
    with database.write() as connection:
        if database.sqlite:
            for word in ("update", "delete"):
                connection.execute(text(f"DROP TRIGGER IF EXISTS audit_no_{word}"))
        else:
            connection.execute(text("DROP TRIGGER IF EXISTS audit_add_only ON audit"))
        connection.execute(text(statement))


def test_who_gets_past_the_triggers_shows(catalog: Catalog) -> None:
    for _ in range(5):
        catalog.audit.add(ENTRY)
    _without_triggers(catalog.database, "UPDATE audit SET actor = 'otto' WHERE number = 2")
    assert catalog.audit.verify().problems == ("entry 2 was altered or moved",)
    _without_triggers(catalog.database, "DELETE FROM audit WHERE number IN (3, 4)")
    assert "entries 3 to 4 are missing" in catalog.audit.verify().problems


def test_two_processes_that_add_at_once_keep_one_chain(url: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with open_catalog(url) as one, open_catalog(url) as other, ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda which: (one, other)[which % 2].audit.add(ENTRY).number, range(24)))
        assert sorted(numbers) == list(range(1, 25))
        assert one.audit.verify().problems == ()


def test_a_request_with_a_key_is_remembered_for_a_day(catalog: Catalog) -> None:
    assert catalog.requests.begin("t1", "k", "d1", NOW) is None
    earlier = catalog.requests.begin("t1", "k", "d2", NOW)
    assert earlier is not None
    assert (earlier.digest, earlier.status) == ("d1", None)
    assert catalog.requests.begin("t2", "k", "d2", NOW) is None
    catalog.requests.finish("t1", "k", 202, {"location": "/v1/jobs/x"}, b"{}")
    earlier = catalog.requests.begin("t1", "k", "d1", NOW + timedelta(hours=23))
    assert earlier is not None
    assert (earlier.status, earlier.headers, earlier.body) == (202, {"location": "/v1/jobs/x"}, b"{}")
    assert catalog.requests.begin("t1", "k", "d1", NOW + timedelta(hours=25)) is None
    catalog.requests.forget("t1", "k")
    assert catalog.requests.begin("t1", "k", "d3", NOW + timedelta(hours=25)) is None


def test_of_many_that_begin_one_request_at_once_one_does(url: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with open_catalog(url) as one, ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: one.requests.begin("t", "k", "d", NOW), range(6)))
    assert found.count(None) == 1


def test_a_copy_of_the_catalog_keeps_the_audit_as_it_was(catalog: Catalog, tmp_path: Path) -> None:
    catalog.audit.add(ENTRY)
    before = catalog.audit.verify()
    catalog.write_snapshot(tmp_path / "copy.db")
    with open_catalog(f"sqlite:///{tmp_path}/copy.db") as copy:
        assert copy.audit.verify() == before


def test_a_catalog_that_is_made_anew_goes_on_with_the_audit_of_the_lost_one(catalog: Catalog, tmp_path: Path) -> None:
    with open_catalog(f"sqlite:///{tmp_path}/lost.db") as lost:
        written = [lost.audit.add(ENTRY) for _ in range(3)]
        assert catalog.take_history(lost) == 3
        assert catalog.take_history(lost) == 0
    assert catalog.audit.list() == tuple(reversed(written))
    assert catalog.audit.add(ENTRY).number == 4
    assert catalog.audit.verify().problems == ()


def test_a_challenge_is_answered_once(catalog: Catalog) -> None:
    first = Challenge("20261121T042500Z-00000001", "A" * 40, "ops@example.com", NOW, "0" * 64)
    second = Challenge("20261122T042500Z-00000002", "A" * 40, "ops@example.com", NOW + timedelta(days=1), "1" * 64)
    other = Challenge("20261122T042500Z-00000003", "B" * 40, "bank", NOW, "2" * 64)
    for challenge in (first, second, other):
        catalog.challenges.add(challenge)
    assert catalog.challenges.list("A" * 40) == (second, first)
    assert set(catalog.challenges.list()) == {first, second, other}
    catalog.challenges.answer(first.id, NOW + timedelta(days=2), "ann")
    answered = catalog.challenges.get(first.id)
    assert (answered.answered_at, answered.answered_by) == (NOW + timedelta(days=2), "ann")
    with pytest.raises(RefusedError, match="already answered"):
        catalog.challenges.answer(first.id, NOW, "bob")
    with pytest.raises(RefusedError, match="older than 30 days"):
        catalog.challenges.answer(other.id, NOW + timedelta(days=30, seconds=1), "bank")
    catalog.challenges.answer(other.id, NOW + timedelta(days=30), "bank")
    with pytest.raises(NotFoundError, match="no challenge"):
        catalog.challenges.get("20261122T042500Z-00000009")
