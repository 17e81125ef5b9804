"""Every kind of event that the program writes has a meaning."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import backupd
from backupd.alerts.conditions import Kind
from backupd.alerts.rules import RULES, Act, kinds_of, rule_of, title_of
from backupd.app.jobs.jobs import BAD
from backupd.model.event import Event, Incident, Severity
from backupd.model.job import JobState

ROOT = Path(backupd.__file__).parent
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
NO_EVENT = {JobState.QUEUED, JobState.WAITING, JobState.RUNNING, JobState.SUCCEEDED}
"""States of jobs that no event of that name tells."""
ELSEWHERE = {
    ("backupd.app.service.daemon", "kind"): "self._event",
    ("backupd.app.context.wiring", "kind"): "",
    ("backupd.app.jobs.jobs", "kind"): "",
    ("backupd.app.restores.thaw_jobs", "kind"): "",
    ("backupd.app.retention.holds", "_WORDS[one.kind][0]"): "_WORDS",
    ("backupd.app.retention.holds", "word"): "_WORDS",
}
"""Expressions that only a call can tell: what tells them is the name of a call's function, or of a module's value;
where it is empty, they are of calls of one ``ABOUT_A_JOB``, or of ``Wiring.note``."""
ABOUT_A_JOB = ("event_of", "_event", "_warn")
"""Functions of jobs whose third argument is the kind of an event."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.glob("app/**/*.py")):
        text = path.read_text()
        if "model.event import" in text or "alerts.rules import" in text or "event_of(" in text or ".note(" in text:
            yield ".".join(("backupd", *path.relative_to(ROOT).with_suffix("").parts)), ast.parse(text)


def kinds() -> Iterator[tuple[str, str]]:
    """Each kind, with where it was found."""
    for name, tree in modules():
        module = importlib.import_module(name)
        for value in vars(module).values():
            if isinstance(value, Kind):
                yield value.broken, name
                yield value.mended, name
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Event":
                given = [word.value for word in node.keywords if word.arg == "kind"] or node.args[1:2]
                yield from ((kind, name) for kind in resolved(module, tree, given[0]))
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("wiring.note", "self.note")):
                yield from ((kind, name) for kind in resolved(module, tree, node.args[0]))
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ABOUT_A_JOB and hasattr(module, "event_of"):
                yield from ((kind, name) for kind in resolved(module, tree, node.args[2]))


def resolved(module: Any, tree: ast.Module, expression: ast.expr) -> Iterator[str]:
    text = ast.unparse(expression)
    told = ELSEWHERE.get((module.__name__, text))
    if told == "self._event":
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == told:
                yield eval(ast.unparse(node.args[0]), vars(module))  # a word, or a constant of that module
    elif told:
        for words in getattr(module, told).values():
            yield from words
    elif told is None and isinstance(expression, ast.JoinedStr):
        assert text in {"f'job-{state}'", "f'job-{job.state}'"}, f"{module.__name__}: {text}"
        yield from (f"job-{state}" for state in JobState if state not in NO_EVENT)
    elif told is None:
        try:
            found = eval(text, vars(module))  # a constant of that module
        except NameError as error:
            raise AssertionError(f"{module.__name__}: say in ELSEWHERE what {text} can be") from error
        assert isinstance(found, str)
        yield found


def test_every_kind_in_the_source_is_classified() -> None:
    found = set(kinds())
    assert len({kind for kind, _where in found}) > 60
    assert {(kind, where) for kind, where in found if kind not in RULES} == set()


def test_every_rule_is_of_a_kind_that_is_written() -> None:
    written = {kind for kind, _where in kinds()}
    assert {kind for kind, rule in RULES.items() if kind not in written and rule.well} == set()


def test_what_nobody_looks_after_any_more_ends_whatever_a_pair_told_of() -> None:
    for kind, rule in RULES.items():
        if not rule.well:
            broken = kind.removesuffix("-unwatched")
            incident = Incident("i", broken, "db1", "", Severity.ERROR, "", "", "", NOW, NOW)
            assert (rule.act, rule.topic, kind in [one.unwatched for one in kinds_of(incident)]) == (
                Act.CLOSES,
                RULES[broken].topic,
                True,
            )


def test_every_pair_is_one_incident_that_its_second_kind_closes() -> None:
    for name, _tree in modules():
        for pair in vars(importlib.import_module(name)).values():
            if isinstance(pair, Kind) and RULES[pair.broken].act is not Act.SILENT:
                assert (RULES[pair.broken].act, RULES[pair.mended].act) == (Act.OPENS, Act.CLOSES), pair
                assert RULES[pair.broken].topic == RULES[pair.mended].topic, pair


def test_what_counts_as_a_bad_job_is_what_opens_its_incident() -> None:
    assert {kind for kind, rule in RULES.items() if rule.topic == "job" and rule.act is Act.OPENS} == set(BAD)


def test_an_unknown_trouble_is_told_and_unknown_good_news_are_not() -> None:
    unknown = Event(NOW, "volcano", Severity.ERROR, "it smokes")
    assert rule_of(unknown).act is Act.OPENS
    assert rule_of(Event(NOW, "volcano", Severity.INFO, "it sleeps")).act is Act.SILENT
    incident = Incident("i", "big-volcano", "db1", "", Severity.ERROR, "", "", "", NOW, NOW)
    assert title_of(incident) == "db1: big volcano"
