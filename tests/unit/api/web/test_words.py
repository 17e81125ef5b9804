"""Words on pages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from api.web.site import link
from api.web.words import MARKS, ago, kind_word, problem_of, progress_words, span_text, tone_of
from backupd.model.errors import ConfigurationError, Problem, RefusedError
from backupd.model.job import JobKind, JobState

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0s"),
        (4.24, "4.2s"),
        (59.94, "59.9s"),
        (59.96, "1m"),
        (200, "3m 20s"),
        (3599.7, "1h"),
        (7512, "2h 5m"),
        (86399, "1d"),
        (3 * 86400 + 4.4 * 3600, "3d 4h"),
        (400 * 86400, "400d"),
    ],
)
def test_a_span_of_time_is_told_by_its_two_largest_units(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


def test_a_moment_is_told_as_seen_from_now() -> None:
    assert ago(NOW - timedelta(seconds=200), NOW) == "3m 20s ago"
    assert ago(NOW + timedelta(hours=2), NOW) == "in 2h"
    assert ago(NOW, NOW) == "now"


def test_every_state_and_kind_of_job_has_a_tone_and_a_word() -> None:
    assert {str(state): tone_of(state) for state in JobState} == {
        "queued": "busy",
        "waiting": "warning",
        "running": "busy",
        "succeeded": "good",
        "partial": "warning",
        "failed": "bad",
        "cancelled": "quiet",
        "abandoned": "warning",
        "missed": "warning",
        "skipped": "warning",
    }
    assert all(tone_of(state) in MARKS for state in JobState)
    assert len({kind_word(kind) for kind in JobKind}) == len(JobKind)


def test_progress_is_one_line() -> None:
    assert progress_words(None) == ""
    told = {
        "phase": "copy",
        "bytes": 1 << 30,
        "bytes_total": None,
        "files": 0,
        "files_total": None,
        "note": "",
        "seconds_left": None,
    }
    assert progress_words(told) == "copy: 1.0 GiB"
    assert progress_words({**told, "bytes_total": 2 << 30, "files": 3, "files_total": 9, "seconds_left": 61.0}) == (
        "copy: 1.0 GiB of 2.0 GiB, 3 of 9 files, 1m 1s left"
    )
    assert progress_words({**told, "bytes": 0}) == "copy"


def test_errors_keep_their_evidence_and_their_next_step() -> None:
    shown = problem_of(RefusedError("no", detail="because", hint="do that"))
    assert (shown.message, shown.detail, shown.hint, shown.problems) == ("no", "because", "do that", ())
    wrong = Problem("gold.yaml", 3, "physical.full", "is no time")
    listed = problem_of(ConfigurationError([wrong], hint="mend it"))
    assert (listed.problems, listed.detail) == ((wrong,), ""), "each is an entry of its own, not told twice"


def test_addresses_quote_whatever_is_in_them() -> None:
    assert link("servers", "a/b?c#d", to="gtid:0-1-2", span="") == "/servers/a%2Fb%3Fc%23d?to=gtid%3A0-1-2"
    assert link("jobs", server=None) == "/jobs"
    assert link() == "/"
