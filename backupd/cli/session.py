"""One command's run: the service it asks, where it shows, and how its failure ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from backupd.cli.options import config_path, wants_json
from backupd.cli.screen.output import Screen, complain, explained
from backupd.model.errors import UnknownNameError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from backupd.app.service.facade import Service


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
