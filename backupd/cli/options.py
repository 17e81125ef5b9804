"""Options that many commands share, and what was said before the command's name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from backupd.model.text import parse_time

DEFAULT_CONFIG = Path("/etc/backupd/backupd.yaml")
CONFIG_VARIABLE = "BACKUPD_CONFIG"

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        show_default=False,
        help=f"Configuration (default: ${CONFIG_VARIABLE}, else {DEFAULT_CONFIG}).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; progress goes to stderr.")]
Server = Annotated[str, typer.Argument(metavar="SERVER", help="Name of a server in the configuration.")]
AnyServer = Annotated[
    str | None,
    typer.Argument(metavar="[SERVER]", show_default=False, help="Name of a server; all servers without it."),
]
BackupId = Annotated[str, typer.Argument(metavar="ID", help="Id of a backup, as `backupd backups` lists it.")]
NewCatalog = Annotated[
    bool,
    typer.Option("--new-catalog", help="Begin an empty catalog although a destination holds backups already."),
]
TARGETS = "latest | backup:ID | a time such as 2026-11-21T09:41:03Z | gtid:... | before-gtid:... | FILE:POS"


def moment(text: str) -> datetime:
    """A time on the command line. Raises BadParameter."""
    try:
        return parse_time(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no time with its offset: write 2026-11-21T09:41:03Z or 2026-11-21T10:41:03+01:00"
        ) from None


def one_of(kind: type[StrEnum], flag: str, what: str, *, metavar: str = "", show_default: bool = True) -> Any:
    """An option that takes one of a few words; ``what``: its help. Another word is told as a name that nobody knows."""

    def read(text: str) -> StrEnum:
        from policies.problems import suggestion  # whoever writes it right need not wait for that

        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not known{suggestion(text, kind)}") from None

    return typer.Option(
        flag, parser=read, metavar=metavar or f"<{'|'.join(kind)}>", show_default=show_default, help=what
    )


@dataclass(frozen=True)
class Before:
    """What stood before the command: ``backupd --config FILE --json backup ...``"""

    config: Path | None = None
    json: bool = False


def remember(context: typer.Context, config: Path | None, as_json: bool) -> None:
    """Keep the options of a group for the commands inside; the inner one wins."""
    outer = context.find_object(Before) or Before()
    context.obj = Before(config=config or outer.config, json=as_json or outer.json)


def config_path(context: typer.Context, given: Path | None) -> Path:
    """The configuration file to use: of the command, of the group, of the environment, or the default."""
    before = context.find_object(Before) or Before()
    from_environment = os.environ.get(CONFIG_VARIABLE)
    return given or before.config or (Path(from_environment) if from_environment else DEFAULT_CONFIG)


def wants_json(context: typer.Context, given: bool) -> bool:
    return given or (context.find_object(Before) or Before()).json
