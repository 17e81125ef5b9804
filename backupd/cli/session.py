"""Options that many commands share, and what was said before the command's name.

One command's run: the service it asks, where it shows, and how its failure ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backupd.cli.output import Screen, complain, explained
from backupd.model.errors import UnknownNameError
from backupd.model.text import parse_time

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from backupd.app.service.facade import Service


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
        from policies.document import suggestion  # whoever writes it right need not wait for that

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


class StoppedError(KeyboardInterrupt):
    """A signal asked this process to end; unwinds everything, as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class Session:
    service: Service
    screen: Screen


def open_service(
    path: Path, held: Path | None = None, opening: str = "reads", *, new_catalog: bool = False
) -> AbstractContextManager[Service]:
    """Open the application. Imported late: ``--help`` and wrong usage need none of it."""
    from backupd.app.context.wiring import Opening
    from backupd.app.service.facade import Service

    return Service.open(path, held, Opening(opening), new_catalog=new_catalog)


@contextmanager
def guarded(context: typer.Context, as_json: bool) -> Iterator[Screen]:
    """Run a command that needs no service: errors are shown and become the exit code."""
    screen = Screen(as_json=wants_json(context, as_json))
    try:
        yield screen
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:  # noqa: BLE001  last resort; told, or written to a file that is named
        told = explained(error, context.command_path)
        screen.error(told)
        raise typer.Exit(told.exit_code) from None
    except KeyboardInterrupt as interrupt:
        number = interrupt.number if isinstance(interrupt, StoppedError) else 2
        complain([("interrupted", ""), *((note, "") for note in getattr(interrupt, "__notes__", ()))])
        raise typer.Exit(128 + number) from None


@contextmanager
def session(
    context: typer.Context,
    config: Path | None,
    as_json: bool,
    held: Path | None = None,
    *,
    opening: str = "reads",
    new_catalog: bool = False,
) -> Iterator[Session]:
    """Run a command with the service of the chosen configuration, or of the settings that another process holds.
    ``opening``, ``new_catalog``: as of ``Service.open``."""
    with (
        guarded(context, as_json) as screen,
        open_service(config_path(context, config), held, opening, new_catalog=new_catalog) as service,
    ):
        try:
            yield Session(service=service, screen=screen)
        except UnknownNameError as error:
            if error.name:
                error.message += service.listings.resembling(error.kind, error.name)
            raise
