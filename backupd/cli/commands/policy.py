"""``backupd policy``: validate files, explain one, show the schema, show an example. Needs no configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backupd.cli.options import Before, Config, Json
from backupd.cli.session import guarded, open_service
from backupd.model.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from backupd.app.views.policy_explanation import Explanation
    from policies.load import Loaded

app = typer.Typer(help="Policy files: validate, explain, schema, example.", no_args_is_help=True, rich_markup_mode=None)


def _named(context: typer.Context, config: Path | None) -> Path | None:
    """The configuration that was named on the command line; here the default one is not looked for."""
    return config or (context.find_object(Before) or Before()).config


@app.command()
def validate(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Policy files, or folders of them.")],
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Read policy files and name everything that is wrong in them, with file and line. With --config also what does
    not fit the configuration."""
    with guarded(context, as_json) as screen:
        from policies.lint import advice, crowds, not_yet_active
        from policies.load import load, read_policy, unknown_destinations

        named = _named(context, config)
        loaded: Loaded | None = load(named) if named else None
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
            notes[str(named)] = crowds(loaded.configuration, loaded.policies)
        screen.document([{"file": file, "valid": True, "warnings": texts} for file, texts in notes.items()])
        for name, texts in notes.items():
            screen.line(f"{name}: valid", style="green")
            for text in texts:
                screen.line(f"  warning: {text}", style="yellow")


@app.command()
def explain(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A policy file, in use or not yet.")],
    server: Annotated[
        str | None, typer.Option("--server", metavar="NAME", help="For this server.", show_default=False)
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Say what a policy does: in sentences, its runs of the coming two weeks, and what is kept after them.

    With --config it begins with the backups that are there, shows which of them its rules would expire today, and says
    when the destinations are full.
    """
    with guarded(context, as_json) as screen:
        named = _named(context, config)
        if named is not None:
            with open_service(named, opening="looks") as service:
                found = service.servers.explain(file, server)
        else:
            found = _alone(file, server)
        screen.document(found.as_json())
        if not screen.as_json:
            from backupd.cli.screen.policy_outlook import show_explanation

            show_explanation(screen, found)


def _alone(file: Path, server: str | None) -> Explanation:
    from backupd.app.context.wiring import utc_now
    from backupd.app.views.policy_explanation import explain_file

    return explain_file(file, server or "", now=utc_now())


@app.command()
def schema(context: typer.Context, as_json: Json = False) -> None:
    """Print the JSON schema of policy files, for editors."""
    del as_json
    with guarded(context, False) as screen:
        from policies.reference import policy_schema

        # With and without --json it is the same document.
        screen.as_json = False
        screen.text(json.dumps(policy_schema(), indent=2, ensure_ascii=False))


@app.command()
def example(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Which example.")] = "gold",
    as_json: Json = False,
) -> None:
    """Print a complete policy to start from; `backupd` names an example of the configuration itself."""
    with guarded(context, as_json) as screen:
        from policies import reference

        text = reference.example(name)
        screen.document({"name": name, "text": text, "examples": list(reference.example_names())})
        screen.text(text)
