"""``backupd policy``: validate files, explain one, show the schema, show an example. Needs no configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from zoneinfo import ZoneInfo

import typer

from backupd.cli.output import Screen
from backupd.cli.session import Commands, Run, option
from backupd.model.errors import ConfigurationError, Problem
from backupd.model.text import format_size

if TYPE_CHECKING:
    from backupd.app.retention.rules import Decision, Decisions
    from backupd.app.views.policies import Explanation
    from policies.handed import Loaded


app = Commands(shared=False, help="Policy files: validate, explain, schema, example.", no_args_is_help=True)


@app.command()
def validate(
    run: Run, files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Policy files, or folders of them.")]
) -> None:
    """Check policy files and list every problem, with file and line. With --config, also those with the
    configuration."""
    from policies.lint import advice, crowds, not_yet_active
    from policies.load import load, read_policy, unknown_destinations

    loaded: Loaded | None = load(run.named) if run.named else None
    configuration = loaded.configuration if loaded else None
    problems: list[Problem] = []
    notes: dict[str, list[str]] = {}
    for path in files:
        found = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
        if not found:
            problems.append(Problem(str(path), None, "", "no *.yaml file in this folder"))
        for file in found:
            read = read_policy(file)
            problems.extend(read.problems)
            if configuration is not None:
                problems.extend(unknown_destinations(read, configuration.destinations))
            if read.policy is not None:
                notes[str(file)] = [*advice(read.policy, configuration), *not_yet_active(read.policy)]
    if problems:
        raise ConfigurationError(problems, hint="`backupd policy example` shows a complete policy")
    if loaded is not None:
        notes[str(run.named)] = crowds(loaded.configuration, loaded.policies)
    run.screen.document([{"file": file, "valid": True, "warnings": texts} for file, texts in notes.items()])
    for name, texts in notes.items():
        run.screen.line(f"{name}: valid", style="green")
        for text in texts:
            run.screen.line(f"  warning: {text}", style="yellow")


@app.command(opening="looks")
def explain(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A policy file, in use or not yet.")],
    server: Annotated[str | None, option("--server", "NAME", "Explain it for this server.")] = None,
) -> None:
    """Explain a policy: in sentences, its runs of the next two weeks, and the backups that are then kept.

    With --config, it starts from the existing backups, shows which of them the rules would expire today, and forecasts
    when the destinations are full.
    """
    found = _alone(file, server) if run.named is None else run.service.servers.explain(file, server)
    run.screen.document(found.as_json())
    if not run.screen.as_json:
        show_explanation(run.screen, found)


def _alone(file: Path, server: str | None) -> Explanation:
    from backupd.app.views.policies import explain_file
    from backupd.process.run_context import utc_now

    return explain_file(file, server or "", now=utc_now())


@app.command(takes=("as_json",))
def schema(run: Run) -> None:
    """Print the JSON schema of policy files, for editors."""
    from policies.reference import policy_schema

    # With and without --json it is the same document.
    run.screen.as_json = False
    run.screen.text(json.dumps(policy_schema(), indent=2, ensure_ascii=False))


@app.command(takes=("as_json",))
def example(run: Run, name: Annotated[str, typer.Argument(metavar="[NAME]", help="Which one.")] = "gold") -> None:
    """Print a complete policy to start from; `backupd` names an example of the configuration itself."""
    from policies import reference

    text = reference.example(name)
    run.screen.document({"name": name, "text": text, "examples": list(reference.example_names())})
    run.screen.text(text)


_MOST_RUNS = 60


def show_explanation(screen: Screen, found: Explanation) -> None:
    zone = ZoneInfo(found.zone)
    whom = f" for {found.server}" if found.server else ""
    screen.line(f"{found.policy}{whom}", style="bold")
    for sentence in found.sentences:
        screen.line(f"  {sentence}")
    for text in found.warnings:
        screen.line(f"  warning: {text}", style="yellow")
    screen.line()
    screen.line(f"Runs from {_time(found.at, zone)} to {_time(found.until, zone)}, in {found.zone}:", style="bold")
    shown = found.runs[:_MOST_RUNS]
    screen.table(["start", "leg"], ([_time(run.at, zone), run.leg] for run in shown))
    if len(found.runs) > len(shown):
        screen.line(f"... and {len(found.runs) - len(shown)} more; --json lists them all")
    for decisions in found.today:
        screen.line()
        screen.line(
            f"{decisions.destination} today: {len(decisions.kept)} stay, {len(decisions.expired)} would expire "
            f"({format_size(decisions.bytes_expired)})",
            style="bold",
        )
        _decisions(screen, decisions.expired, zone)
        for text in decisions.warnings:
            screen.line(f"  warning: {text}", style="yellow")
    for decisions in found.ahead:
        screen.line()
        screen.line(
            f"{decisions.destination} after these runs: {len(decisions.kept)} backups{_span(decisions, zone)}",
            style="bold",
        )
        _decisions(screen, decisions.kept, zone)
    if found.forecasts:
        screen.line()
    for one in found.forecasts:
        screen.line(f"{one.destination}: {one.text}", style="yellow" if one.is_soon else "")


def _decisions(screen: Screen, decisions: Iterable[Decision], zone: ZoneInfo) -> None:
    rows = [
        [one.backup.id, str(one.backup.kind), _time(one.backup.finished_at, zone), "; ".join(one.reasons)]
        for one in decisions
    ]
    if rows:
        screen.table(["backup", "kind", "finished", "why"], rows)


def _span(decisions: Decisions, zone: ZoneInfo) -> str:
    moments = [decision.backup.finished_at for decision in decisions.kept]
    return f", the oldest of {_time(min(moments), zone)}" if moments else ""


def _time(moment: datetime, zone: ZoneInfo) -> str:
    return f"{moment.astimezone(zone):%a %Y-%m-%d %H:%M}"
