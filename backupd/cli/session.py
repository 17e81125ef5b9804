"""What every command shares: its options, and its run, with the service it asks, where it shows, and how it fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, tzinfo
from functools import cached_property, update_wrapper
from inspect import Parameter, Signature, signature
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backupd.cli.output import BROKEN_PIPE, Screen, complain, explained
from backupd.model.errors import UnknownNameError
from backupd.model.text import format_time, parse_time

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from backupd.app.service.facade import Service
    from backupd.model.job import Report

DEFAULT_CONFIG = Path("/etc/backupd/backupd.yaml")
CONFIG_VARIABLE = "BACKUPD_CONFIG"


def option(flag: str, metavar: str, what: str, **rules: Any) -> Any:
    """An option that takes a value. ``what``: its help, which says the default where there is one; ``rules``: as of
    ``typer.Option``."""
    return typer.Option(flag, metavar=metavar, show_default=False, help=what, **rules)


def flag(name: str, what: str) -> Any:
    """An option that is given or not. ``what``: its help."""
    return typer.Option(name, help=what)


def one_of(words: Iterable[str], flag: str, what: str, *, metavar: str = "", show_default: bool = True) -> Any:
    """An option that takes one of a few words; ``what``: its help. Another word is reported as a name that nobody
    knows."""

    def read(text: str) -> str:
        from policies.document import suggestion  # whoever writes it right need not wait for that

        if found := [word for word in words if word == text]:
            return found[0]
        raise typer.BadParameter(f"{text!r} is not known{suggestion(text, words)}")

    known = list(words)
    return typer.Option(
        flag,
        parser=read,
        metavar=metavar or f"<{'|'.join(known)}>",
        show_default=show_default,
        help=what,
        autocompletion=lambda: known,
    )


@dataclass(frozen=True)
class Written:
    """A time on the command line: its ``moment``, or the ``text`` of one that only the configuration's time zone makes
    a moment."""

    moment: datetime | None
    text: str


def written(text: str) -> Written:
    """A time on the command line. Raises BadParameter."""
    try:
        return Written(parse_time(text), text)
    except ValueError:
        from backupd.model.local_time import EXAMPLES, is_local

        if is_local(text):
            return Written(None, text)
        raise typer.BadParameter(
            f"{text!r} is not a time: write 2026-11-21T09:41:03Z, 2026-11-21T10:41:03+01:00, or {EXAMPLES} in the "
            "configured time zone"
        ) from None


Config = Annotated[
    Path | None, option("--config", "FILE", f"Configuration (default: ${CONFIG_VARIABLE}, else {DEFAULT_CONFIG}).")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; progress goes to stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show nothing but errors.")]
Server = Annotated[str, typer.Argument(metavar="SERVER", help="Name of a server in the configuration.")]
AnyServer = Annotated[
    str | None,
    typer.Argument(metavar="[SERVER]", show_default=False, help="Name of a server; all servers without it."),
]
Labels = Annotated[
    list[str] | None,
    option("--label", "KEY=VALUE", "Only servers with this label. May be repeated: servers with all of them."),
]
BackupId = Annotated[str, typer.Argument(metavar="ID", help="Id of a backup, as `backupd backups` lists it.")]
Destination = Annotated[str, typer.Argument(metavar="DESTINATION", help="Name of a destination in the configuration.")]
NewCatalog = Annotated[
    bool,
    typer.Option("--new-catalog", help="Create an empty catalog even if a destination already holds backups."),
]
TARGETS = (
    "latest | backup:ID | a time such as 2026-11-21T09:41:03Z, or '20:30' and 'yesterday 14:00' in the configured time "
    "zone | gtid:... | before-gtid:... | FILE:POS"
)


@dataclass(frozen=True)
class Before:
    """What was given before the command: ``backupd --config FILE --json backup ...``"""

    config: Path | None = None
    json: bool = False


def remember(context: typer.Context, config: Config = None, as_json: Json = False) -> None:
    """Keep the options of a group for the commands inside; the inner one wins."""
    outer = context.find_object(Before) or Before()
    context.obj = Before(config=config or outer.config, json=as_json or outer.json)


class StoppedError(KeyboardInterrupt):
    """A signal asked this process to end; unwinds everything, as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def open_service(
    path: Path, held: Path | None = None, opening: str = "reads", *, new_catalog: bool = False
) -> AbstractContextManager[Service]:
    """Open the application. Imported late: ``--help`` and wrong usage need none of it."""
    from backupd.app.context.wiring import Opening
    from backupd.app.service.facade import Service

    return Service.open(path, held, Opening(opening), new_catalog=new_catalog)


@dataclass
class Run:
    """One command's run. ``named``: the configuration that the command line names, if it does; ``held``: settings that
    another process holds; ``opening``, ``new_catalog``: as of ``Service.open``; ``follows``: the servers of which it
    takes backups, so that their rules are applied when it is over, and what is due is removed; None: it does nothing
    that either follows from; ``root``: the group of all commands."""

    screen: Screen
    named: Path | None
    opening: str
    stack: ExitStack
    held: Path | None = None
    new_catalog: bool = False
    follows: Collection[str] | None = None
    root: Any = None

    @property
    def config(self) -> Path:
        """The configuration file to use: of the command, of the group, of the environment, or the default."""
        from_environment = os.environ.get(CONFIG_VARIABLE)
        return self.named or (Path(from_environment) if from_environment else DEFAULT_CONFIG)

    @cached_property
    def service(self) -> Service:
        """Opened when it is asked for first, closed at the end of the command. Raises BackupdError."""
        return self.stack.enter_context(
            open_service(self.config, self.held, self.opening, new_catalog=self.new_catalog)
        )

    def reporting(self) -> AbstractContextManager[Report]:
        """Progress on stderr until the block ends; none where only errors are wanted."""
        if self.screen.quiet:
            from backupd.model.job import silent

            return nullcontext(silent)
        from backupd.cli.progress import reporting

        return reporting()

    def moment(self, time: Written | None) -> datetime | None:
        """The moment of a time that was written on the command line. Raises UsageError for one without an offset that
        has no meaning, or two."""
        if time is None or time.moment is not None:
            return time.moment if time is not None else None
        return self.service.installation.moment(time.text)

    @property
    def zone(self) -> tzinfo | None:
        """In which times are shown beside UTC, to people; None: in none."""
        return None if self.screen.as_json else self.service.installation.zone()

    def target(self, text: str) -> str:
        """A target as the application reads it: a time without an offset becomes one in UTC. Raises UsageError."""
        from backupd.model.local_time import is_local

        if is_local(text):
            return format_time(self.service.installation.moment(text))
        time, _at, branch = text.rpartition("@")
        return f"{format_time(self.service.installation.moment(time))}@{branch}" if is_local(time) else text

    def labelled(self, labels: Sequence[str] | None, server: str | None) -> Service:
        """The service for lists: as if there were only the servers with these labels, if there are labels."""
        return self.service.labelled(labels, server) if labels else self.service

    def show_list(
        self,
        found: Iterable[Any],
        nothing: str,
        columns: Sequence[str],
        row: Callable[[Any], Sequence[str]],
        *,
        right: Sequence[str] = (),
        limit: int | None = None,
    ) -> None:
        """Show the documents of a list while it is read; for people a table with a row of each, or the sentence
        ``nothing``. ``limit``: so many of ``found`` are shown, and a warning says when there are more."""
        every = iter(found)
        shown = islice(every, limit)
        if self.screen.as_json:
            self.screen.documents(one.as_json() for one in shown)
        elif (first := next(rows := map(row, shown), None)) is not None:
            self.screen.table(columns, chain([first], rows), right=right)
        else:
            self.screen.line(nothing)
        if limit is not None and next(every, None) is not None:
            self.screen.warn(f"only the newest {limit} are listed; for more: --limit NUMBER")

    def follow_up(self) -> None:
        """Do what follows from the jobs of this command, if nobody else does. What goes wrong is reported, and changes
        nothing of how the command ends."""
        if self.follows is None or "service" not in vars(self):
            return
        try:
            for job, error in self.service.follow_ups.run(self.follows):
                self.screen.warn(f"{job.leg or job.kind} did not succeed (job {job.id}): {error.line}")
        except KeyboardInterrupt:
            self.screen.warn(
                "the removal of expired backups was interrupted; the next backup, or the service, continues it"
            )
        except Exception as error:  # noqa: BLE001  reported; the job that was asked for has ended, and well or ill as it says
            self.screen.warn(f"expired backups were not removed: {explained(error, 'the removal').line}")

    def ends(self, *, well: bool) -> None:
        """Exit status 1 unless it ends well. Raises Exit."""
        if not well:
            raise typer.Exit(1)


@contextmanager
def running(
    context: typer.Context, config: Path | None, as_json: bool, opening: str, *, quiet: bool = False
) -> Iterator[Run]:
    """Run a command: errors are shown and become the exit code. What follows from its jobs is done after that."""
    before = context.find_object(Before) or Before()
    screen = Screen(as_json=as_json or before.json, quiet=quiet)
    with _shown(context, screen), ExitStack() as stack:
        run = Run(screen, config or before.config, opening, stack, root=context.find_root().command)
        try:
            with _shown(context, screen):
                try:
                    yield run
                except UnknownNameError as error:
                    if error.name and "service" in vars(run):
                        error.message += run.service.listings.resembling(error.kind, error.name)
                    raise
        except typer.Exit as ending:
            if ending.exit_code in _FOLLOWED:
                run.follow_up()
            raise
        run.follow_up()


_FOLLOWED = (0, 1, BROKEN_PIPE)
"""Exit codes of commands that did their job, well or ill: neither used wrongly nor ended by a signal."""


@contextmanager
def _shown(context: typer.Context, screen: Screen) -> Iterator[None]:
    """Errors are shown and become the exit code."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:  # noqa: BLE001  last resort; reported, or written to a file that is named
        explanation = explained(error, context.command_path)
        screen.error(explanation)
        raise typer.Exit(explanation.exit_code) from None
    except KeyboardInterrupt as interrupt:
        number = interrupt.number if isinstance(interrupt, StoppedError) else 2
        complain([("interrupted", ""), *((note, "") for note in getattr(interrupt, "__notes__", ()))])
        raise typer.Exit(128 + number) from None


Command = Callable[..., None]
_COMMON = (
    Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=Config),
    Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json),
    Parameter("quiet", Parameter.KEYWORD_ONLY, default=False, annotation=Quiet),
)
WORK = ("config", "as_json", "quiet")
"""The common options of a command that works, and not only shows something."""


class Commands(typer.Typer):
    """A group of commands. The function of each takes its run, and its own options and arguments; --config and --json
    are added. ``shared``: the group itself takes these two as well."""

    def __init__(self, *, shared: bool = True, **options: Any) -> None:
        super().__init__(rich_markup_mode=None, add_completion=False, **options)
        if shared:
            self.callback()(remember)

    def command(  # type: ignore[override]  # typer's own has every setting of a command
        self,
        name: str | None = None,
        *,
        opening: str = "reads",
        takes: Sequence[str] = ("config", "as_json"),
        hidden: bool = False,
    ) -> Callable[[Command], Command]:
        """``opening``: of ``Service.open``; ``takes``: which of the common options the command has."""
        register = super().command(name, hidden=hidden)

        def add(function: Command) -> Command:
            register(_served(function, opening, takes))
            return function

        return add


def _served(function: Command, opening: str, takes: Sequence[str]) -> Command:
    """``function`` as typer calls it: with the context, and the common options behind its own."""

    def call(
        context: typer.Context, config: Path | None = None, as_json: bool = False, quiet: bool = False, **given: Any
    ) -> None:
        with running(context, config, as_json, opening, quiet=quiet) as run:
            function(run, **given)

    own = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in signature(function, eval_str=True).parameters.values()]
    first = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    update_wrapper(call, function, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    call.__annotations__ = {}  # those of the signature count
    call.__signature__ = Signature([first, *own[1:], *(one for one in _COMMON if one.name in takes)])  # type: ignore[attr-defined]
    return call
