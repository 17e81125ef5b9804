"""Policies as people look at them: the file, who follows it, what is wrong with it, what could be better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backupd.app.context.wiring import Wiring
from backupd.model.errors import Problem, UsageError
from backupd.model.text import is_name
from policies.lint import advice, not_yet_active
from policies.load import SUFFIX, PolicyFile, read_policy_text, unknown_destinations

LARGEST_TEXT = 64 * 1024
"""Bytes that anybody may have looked at: reading YAML costs a processor about a second per 100 KiB."""


@dataclass(frozen=True, slots=True)
class PolicyView:
    """``servers``: those that follow it; ``problems``: why it is not in force; ``text``: the file as it is now, which
    may not be what was loaded (``in_force`` False), "" where it cannot be read; ``unread``: the text is another than
    what was loaded or found wrong then; ``wrong_now``: the problems of the text."""

    name: str
    file: str
    servers: tuple[str, ...]
    problems: tuple[Problem, ...]
    advice: tuple[str, ...]
    text: str
    in_force: bool
    unread: bool
    wrong_now: tuple[Problem, ...]

    def as_json(self) -> dict[str, Any]:
        """The document of REST: problems with file, line and field."""
        return {
            "name": self.name,
            "file": self.file,
            "servers": list(self.servers),
            "problems": [problem_json(problem) for problem in self.problems],
            "advice": list(self.advice),
            "text": self.text,
            "in_force": self.in_force,
        }


@dataclass(frozen=True, slots=True)
class Validation:
    """Of a text that is no file yet."""

    valid: bool
    problems: tuple[Problem, ...]
    advice: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The document of REST and `backupd policy validate --json`."""
        return {
            "valid": self.valid,
            "problems": [problem_json(problem) for problem in self.problems],
            "advice": list(self.advice),
        }


def problem_json(problem: Problem) -> dict[str, Any]:
    """One problem of a policy file; ``line`` is null where it belongs to none."""
    return {"file": problem.file, "line": problem.line, "field": problem.field, "message": problem.message}


def policies(wiring: Wiring, *, every: bool) -> tuple[PolicyView, ...]:
    """By name. ``every``: also those that none of the configured servers follows."""
    settings = wiring.settings
    followers: dict[str, list[str]] = {}
    for name, server in settings.servers.items():
        followers.setdefault(server.policy, []).append(name)
    names = {*followers, *settings.policies, *settings.broken} if every else set(followers)
    return tuple(_view(wiring, name, sorted(followers.get(name, ()))) for name in sorted(names))


def validate(wiring: Wiring, text: str, name: str) -> Validation:
    """Raises UsageError for a name that no policy can have."""
    if not is_name(name):
        raise UsageError(
            f"{name[:80]!r} cannot be the name of a policy", hint="letters, digits, '.', '_' and '-' only, at most 63"
        )
    file = Path(f"{name}{SUFFIX}")
    if len(text.encode("utf-8", "surrogatepass")) > LARGEST_TEXT:
        return Validation(
            False, (Problem(str(file), None, "", f"is larger than {LARGEST_TEXT // 1024} KiB: that is no policy"),), ()
        )
    found = read_policy_text(text, file)
    problems = (*found.problems, *unknown_destinations(found, wiring.settings.destinations))
    return Validation(not problems, problems, _advice(wiring, found))


def _view(wiring: Wiring, name: str, servers: Sequence[str]) -> PolicyView:
    settings = wiring.settings
    path = settings.configuration.policies / f"{name}{SUFFIX}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    now = read_policy_text(text, path)
    wrong_now = (*now.problems, *unknown_destinations(now, settings.destinations))
    known, broken = settings.policies.get(name), settings.broken.get(name, ())
    in_force = known is not None and known == now.policy
    unread = (
        not in_force if known is not None else bool(text) and is_name(name) and _differs(broken, wrong_now, str(path))
    )
    return PolicyView(name, str(path), tuple(servers), broken, _advice(wiring, now), text, in_force, unread, wrong_now)


def _differs(broken: Sequence[Problem], now: Sequence[Problem], file: str) -> bool:
    """Is what was wrong with this file something else now? ``broken`` may also tell of a server that names a policy
    without a file, which has one now."""
    missed = any(problem.field.startswith("servers.") for problem in broken)
    return missed or {problem for problem in broken if problem.file == file} != set(now)


def _advice(wiring: Wiring, found: PolicyFile) -> tuple[str, ...]:
    if found.policy is None:
        return ()
    return (*advice(found.policy, wiring.settings.configuration), *not_yet_active(found.policy))
