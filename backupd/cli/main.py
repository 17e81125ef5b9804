"""The entry point ``backupd``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from backupd.cli.output import Screen, explained, mute
from backupd.cli.session import WORK, Commands, Config, Json, StoppedError, remember
from backupd.process.runtime import hide_memory, return_large_blocks

_COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "serve": ("serve.serve", {"takes": ("config",)}),
    "reload": ("serve.reload", {}),
    "status": ("status.status", {}),
    "setup": ("setup.setup", {"opening": "works"}),
    "check": ("work.check", {"opening": "looks", "takes": WORK}),
    "backup": ("work.backup", {"opening": "works", "takes": WORK}),
    "plan": ("restores.plan", {}),
    "restore": ("restores.restore", {"takes": WORK}),
    "thaw": ("restores.thaw", {}),
    "leftovers": ("tables.leftovers", {}),
    "test-restore": ("restores.prove", {"takes": WORK}),
    "verify": ("work.verify", {"takes": WORK}),
    "consistency": ("work.consistency", {"takes": WORK}),
    "replicate": ("work.replicate", {"takes": WORK}),
    "runbook": ("restores.runbook", {}),
    "retention": ("backups.retention", {"takes": WORK}),
    "hold": ("backups.hold", {}),
    "pause": ("backups.pause", {}),
    "resume": ("backups.resume", {}),
    "fsck": ("work.fsck", {"takes": WORK}),
    "recover-versions": ("catalog.bring_back", {}),
    "bring-back": ("catalog.bring_back", {"hidden": True}),  # its name until 2026-11, for good
    "run-job": ("serve.run_job", {"hidden": True}),
    "timeline": ("binlog.timeline", {}),
    "cluster": ("clusters.cluster", {}),
    "run-stream": ("serve.run_stream", {"takes": ("config",), "hidden": True}),
    "audit": ("access.audit", {}),
    "run-api": ("serve.run_api", {"takes": ("config",), "hidden": True}),
    "completion": ("completion.completion", {"takes": ()}),
    "complete": ("completion.complete", {"takes": (), "hidden": True}),
    "backups": ("backups.app", {}),
    "proofs": ("status.app", {}),
    "policy": ("policy.app", {}),
    "server": ("work.server_app", {}),
    "keys": ("keys.app", {}),
    "jobs": ("jobs.app", {}),
    "hosts": ("jobs.hosts_app", {}),
    "binlog": ("binlog.app", {}),
    "catalog": ("catalog.app", {}),
    "alerts": ("alerts.app", {}),
    "token": ("access.app", {}),
}
"""Commands in the order of the help: module and name of the function or of the group, and what ``Commands.command``
takes."""


class _Named(Mapping[str, Any]):
    """The commands as typer calls them; the module of one is imported when it is asked for, since importing all of them
    takes longer than most commands."""

    def __getitem__(self, name: str) -> Any:
        path, options = _COMMANDS[name]
        module, _, attribute = path.partition(".")
        found = getattr(import_module(f"backupd.cli.commands.{module}"), attribute)
        group = Commands(shared=False)
        if isinstance(found, Commands):
            group.add_typer(found, name=name)
        else:
            group.command(name, **options)(found)
        return get_group(group).commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _Root(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Named()  # type: ignore[assignment]  # nobody adds one

    @property
    def hidden_names(self) -> Collection[str]:
        """Commands that nobody types."""
        return [name for name, (_path, options) in _COMMANDS.items() if options.get("hidden")]


EXIT_CODES = (
    "0: success; of a command that checks something: nothing is wrong",
    "1: the command failed, or found something wrong",
    "2: wrong usage, an unknown name, an invalid configuration",
    "128 + N: ended by signal N (130: Ctrl-C, 143: SIGTERM)",
)
"""What an exit status means."""


app = Commands(
    shared=False,
    cls=_Root,
    help="Backups of MySQL and MariaDB that are proved to restore.",
    epilog="\b\n" + "\n".join(["Exit status:", *(f"  {line}" for line in EXIT_CODES)]),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"backupd {version('backupd')}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    config: Config = None,
    as_json: Json = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version
    remember(context, config, as_json)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C, so that a stopped backup leaves nothing behind. Only the first one: a
    second must not disturb the cleaning up. One that is ignored (nohup, `backupd serve`) stays so."""
    stopped: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        if not stopped:
            stopped.append(number)
            raise StoppedError(number)

    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hold_standard_descriptors() -> None:
    """Fill closed descriptors 0 to 2 with /dev/null: a file of ours opened there would get what tools print."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0 success, 1 failure, 2 wrong usage or invalid configuration, 128 + the signal that stopped it.
    """
    _hold_standard_descriptors()
    return_large_blocks()
    hide_memory()
    mask = os.umask(0o077)  # whatever it was: nobody else reads or changes what we make, but where we say so
    try:
        with _stoppable():
            app(args=None if argv is None else list(argv), prog_name="backupd")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except KeyboardInterrupt as interrupt:
        return 128 + (interrupt.number if isinstance(interrupt, StoppedError) else signal.SIGINT)
    except Exception as error:  # noqa: BLE001  last resort, such as --help on a full stdout; all is reported
        if sys.stdout is not None:
            mute(sys.stdout)
        Screen(as_json=False).error(explained(error, "backupd"))
        return 1
    finally:
        os.umask(mask)
    return 0
