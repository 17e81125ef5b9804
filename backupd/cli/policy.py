"""``backupd policy``: validate files, show the schema, show an example. Needs no configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from backupd.cli.options import Json
from backupd.cli.session import guarded
from backupd.model.errors import ConfigurationError, NotFoundError, Problem

app = typer.Typer(
    help="Policy files: validate, schema, example.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def validate(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Policy files, or folders of them.")],
    as_json: Json = False,
) -> None:
    """Read policy files and name everything that is wrong in them, with file and line."""
    with guarded(context, as_json) as screen:
        from policies.lint import advice, not_yet_active
        from policies.load import load_policy

        problems: list[Problem] = []
        notes: dict[str, list[str]] = {}
        for path in files:
            found = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
            if not found:
                problems.append(Problem(str(path), None, "", "no *.yaml file in this folder"))
            for file in found:
                try:
                    policy = load_policy(file)
                except ConfigurationError as error:
                    problems.extend(error.problems)
                else:
                    notes[str(file)] = [*advice(policy), *not_yet_active(policy)]
        if problems:
            raise ConfigurationError(problems, hint="`backupd policy example` shows a complete policy")
        screen.document([{"file": file, "valid": True, "warnings": texts} for file, texts in notes.items()])
        for name, texts in notes.items():
            screen.line(f"{name}: valid", style="green")
            for text in texts:
                screen.line(f"  warning: {text}", style="yellow")


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

        names = reference.example_names()
        if name not in names:
            raise NotFoundError(f"there is no example {name!r}", hint=f"there are: {', '.join(names)}")
        text = reference.example(name)
        screen.document({"name": name, "text": text, "examples": list(names)})
        screen.text(text)
