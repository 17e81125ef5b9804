"""Answers on stdout (for people or as one JSON document), everything else on stderr; and what a failure that is no
error of ours means to the caller: a sentence, and a next step.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import tzinfo
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import typer

from backupd.model.errors import BackupdError, ConfigurationError, DamagedError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_HINTS = {
    errno.ENOSPC: "free disk space there, then repeat the command",
    errno.EDQUOT: "free space there or raise the quota, then repeat the command",
    errno.EACCES: "run the command as the user that owns it, or correct its permissions",
    errno.EPERM: "run the command as the user that owns it, or correct its permissions",
    errno.EROFS: "the file system is mounted read-only: dmesg shows whether an error caused it; the service may write "
    "only where its unit says (ReadWritePaths= in a drop-in: systemctl edit backupd)",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`, LimitNOFILE= of the unit)",
    errno.ENFILE: "raise the limit of open files of the system (sysctl fs.file-max)",
    errno.ENOMEM: "give this process more memory, then repeat the command",
}
_MEMORY_HINT = (
    "raise its memory limit (`ulimit -v`, MemoryMax= of the unit) or end other programs, then run the command again"
)


def explained(error: Exception, what: str) -> BackupdError:
    """``error`` as one of ours; ``what`` names the command that met it."""
    if isinstance(error, BackupdError):
        return error
    if isinstance(error, MemoryError):
        return BackupdError(f"{what} failed: the process is out of memory", hint=_MEMORY_HINT)
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return BackupdError(
            f"{what} failed: the system refused to create a thread",
            hint="raise the limit (`ulimit -v`, `ulimit -u`, TasksMax= of the unit), then run the command again",
        )
    if isinstance(error, OSError):
        return _of_system(error, what)
    return BackupdError(f"internal error: {type(error).__name__}: {_first_line(error)}", hint=_kept(error))


def reason_of(error: OSError) -> str:
    """``no space left``, or what the system calls it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left ({error.strerror})"
    return error.strerror or _first_line(error) or type(error).__name__


def _of_system(error: OSError, what: str) -> BackupdError:
    paths = [os.fsdecode(path) for path in (error.filename, error.filename2) if isinstance(path, str | bytes)]
    location = f"{' -> '.join(paths)}: " if paths else ""
    hint = _HINTS.get(error.errno or 0, "")
    return BackupdError(f"{what} failed: {location}{reason_of(error)}", hint=hint or _kept(error))


def _first_line(error: Exception) -> str:
    from backupd.process.output import redact

    return redact((str(error).splitlines() or [""])[0])


def _kept(error: Exception) -> str:
    """Write the traceback to a private file (mkstemp makes it 0600); says where it is."""
    from backupd.process.output import redact

    lines = "".join(traceback.format_exception(error)).splitlines()
    try:
        descriptor, path = tempfile.mkstemp(prefix="backupd-error-", suffix=".txt", dir=_lasting_folder())
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join(redact(line) for line in lines) + "\n")
    except OSError as problem:
        return f"report this error; the traceback could not be saved: {reason_of(problem)}"
    except BackupdError as problem:
        return f"report this error; the traceback could not be saved: {problem.message}"
    return f"report this with the file {path}, which holds the traceback"


def _lasting_folder() -> str:
    """That for temporary files, or where these are read-only, as for the service, what stays of the runtime directory.
    Raises RefusedError."""
    from backupd.process.runtime import runtime_directory

    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return str(runtime_directory().parent)


_PIPED_WIDTH = 400
"""Columns when nobody looks: wide enough that no table ever cuts a name."""


def is_live(stream: TextIO) -> bool:
    """Is ``stream`` a terminal that can move its cursor?"""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def console_for(stream: TextIO) -> Console:
    """A rich console that never guesses: colours on a terminal only, unlimited width elsewhere."""
    from rich.console import Console

    return Console(
        file=stream,
        width=None if stream.isatty() else _PIPED_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )


BROKEN_PIPE = 128 + 13
"""Exit code when whoever read stdout went away: that of a program that SIGPIPE ended."""


def mute(stream: TextIO) -> None:
    """Send what is still in the buffer of ``stream`` nowhere: else the interpreter fails on it when it ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def visible(text: str, *, keep: str = "") -> str:
    """``text`` in which what would act on a terminal, or not be seen, is written out (``\\x1b``): names and statements
    are what somebody chose. ``keep``: characters that stay."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in keep or char == "\u00a0"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def beside(text: str, zone: tzinfo | None) -> str:
    """``text`` with the time in ``zone`` behind each moment in UTC; unchanged without a zone."""
    if zone is None:
        return text
    from backupd.model.local_time import in_both

    return in_both(text, zone)


_LAYOUT = "\n\t"
"""What commands themselves write into a line."""
_UNINDENTED = re.compile(r"\n(?=\S)")


_ROWS = 1000
"""So many rows of a list are in memory at a time."""
T = TypeVar("T")


def _in_batches(values: Iterable[T], size: int) -> Iterator[Sequence[T]]:
    given = iter(values)
    while batch := tuple(islice(given, size)):
        yield batch


def _table(columns: Sequence[str], cells: Iterable[Sequence[str]], right: Sequence[str], *, has_head: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", show_header=has_head)
    for column in columns:
        table.add_column(Text(column), overflow="fold", justify="right" if column in right else "left")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _straight(row: Sequence[str], widths: Iterable[int], right: Iterable[bool], length: Callable[[str], int]) -> str:
    """A row of a table whose columns have room, each as wide as ``widths`` says; ``right``: which are numbers."""
    spaces = [" " * (width - length(cell)) for cell, width in zip(row, widths, strict=True)]
    aligned = zip(row, spaces, right, strict=True)
    return " ".join(space + cell if is_number else cell + space for cell, space, is_number in aligned) + "\n"


def _json(value: Any) -> str:
    from pydantic_core import to_json  # ten times as quick as the standard library, which indents in Python

    try:
        return to_json(value, indent=2).decode()
    except ValueError:  # half of a surrogate pair, in a name that is no UTF-8
        return json.dumps(value, indent=2, ensure_ascii=False)


def _may_have_colours(stream: TextIO) -> bool:
    """Is it a terminal, or do the variables that rich heeds say that it is to be treated as one?"""
    return stream.isatty() or any(os.environ.get(name) for name in ("FORCE_COLOR", "TTY_COMPATIBLE"))


def complain(lines: Iterable[tuple[str, str]]) -> None:
    """Lines on stderr, each with its style; a line end within one is written out. Without a stderr there is nobody to
    tell, and nothing fails."""
    stream: TextIO | None = sys.stderr  # None when the process was started without one
    if stream is None:
        return
    try:
        if not _may_have_colours(stream):  # then rich would print them as they are
            stream.writelines(f"{visible(text)}\n" for text, _style in lines)
            stream.flush()
            return
        console = console_for(stream)
        for text, style in lines:
            # Rich ends the process by itself when a pipe is broken, hence its text and our own write.
            with console.capture() as shown:
                console.print(visible(text), style=style or None, soft_wrap=True)
            stream.write(shown.get())
        stream.flush()
    except (OSError, ValueError):
        mute(stream)


def complain_of(error: BackupdError, subject: str = "") -> None:
    """Message, detail and hint on stderr; ``subject``: which of several things failed so."""
    lines = [(f"error: {subject}: {error.message}" if subject else f"error: {error.message}", "bold red")]
    lines += [(f"  {line}", "") for line in error.detail.splitlines()]
    if error.hint:
        lines.append((f"hint: {error.hint}", "cyan"))
    complain(lines)


class Screen:
    """Where one command shows its result. ``as_json`` leaves out everything for people, ``quiet`` all but errors and
    the document.

    ``done`` is what the command has already achieved when it shows its result ("the backup X was taken"): a result
    that cannot be written must not look like work that failed. Writing raises BackupdError; a reader that went away
    ends the command quietly.
    """

    def __init__(self, *, as_json: bool, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.done = ""
        self._lost = False
        self._is_open = False

    @property
    def _for_people(self) -> bool:
        return not (self.as_json or self.quiet)

    @contextmanager
    def _stdout(self) -> Iterator[TextIO]:
        stream: TextIO | None = sys.stdout  # None when the process was started without one
        try:
            if stream is None:
                raise OSError(errno.EBADF, "it is closed")
            yield stream
            stream.flush()
        except BrokenPipeError:
            self._lose(stream)
            raise typer.Exit(BROKEN_PIPE) from None
        except OSError as error:
            self._lose(stream)
            subject = f"{self.done}, but its result" if self.done else "the result"
            raise BackupdError(
                f"{subject} could not be written to stdout: {reason_of(error)}",
                hint="to list the backups: backupd backups" if self.done else "",
            ) from None

    def _lose(self, stream: TextIO | None) -> None:
        self._lost = True
        if stream is not None:
            mute(stream)

    def _print(self, what: Any, *, style: str = "", soft_wrap: bool = False) -> None:
        with self._stdout() as stream:
            console = console_for(stream)
            with console.capture() as shown:
                console.print(what, style=style or None, soft_wrap=soft_wrap)
            stream.write(shown.get())

    def document(self, value: Any) -> None:
        """Print ``value`` as the command's only document; nothing unless JSON was asked for."""
        if self.as_json:
            with self._stdout() as stream:
                stream.write(_json(value) + "\n")

    def documents(self, values: Iterable[Any]) -> None:
        """Print ``values`` as the command's only document, an array, while they are given: of a long list only a part
        is in memory. Where they end with an error, the array stays open, so that nobody takes it for the whole list.
        Nothing unless JSON was asked for."""
        if not self.as_json:
            return
        opening = "["
        for some in _in_batches(values, _ROWS):
            text = ",".join(f"\n{_json(value)}".replace("\n", "\n  ") for value in some)
            with self._stdout() as stream:
                self._is_open = True
                stream.write(opening + text)
            opening = ","
        with self._stdout() as stream:
            stream.write("\n]\n" if self._is_open else "[]\n")
        self._is_open = False

    def text(self, text: str) -> None:
        """``text`` word for word, for people."""
        if self._for_people:
            with self._stdout() as stream:
                stream.write(text.rstrip("\n") + "\n")

    def line(self, text: str = "", *, style: str = "") -> None:
        """One line for people, never wrapped, so that it can be copied. What comes behind a line end in it is indented:
        it may be part of a name that somebody chose, and must not look like a line of ours."""
        if self._for_people:
            self._print(_UNINDENTED.sub("\n  ", visible(text, keep=_LAYOUT)), style=style, soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        """A table for people, printed while its rows are given, ``_ROWS`` at a time. Long values fold instead of being
        cut; ``right`` names columns of numbers."""
        if not self._for_people:
            return
        from rich.cells import cell_len

        room = shutil.get_terminal_size((_PIPED_WIDTH, 0)).columns
        widths = [cell_len(column) for column in columns]
        batches = _in_batches(rows, _ROWS)
        for number, some in enumerate(chain([next(batches, ())], batches)):
            cells = [[visible(value) for value in row] for row in some]
            lengths = (max(map(cell_len, column)) for column in zip(*cells, strict=True))
            widths = list(map(max, widths, lengths)) if cells else widths
            if number and sum(widths) + len(widths) <= room:  # a hundred times as fast as what folds
                numbers = [column in right for column in columns]
                with self._stdout() as stream:
                    stream.writelines(_straight(row, widths, numbers, cell_len) for row in cells)
            else:
                self._print(_table(columns, cells, right, has_head=not number))

    def facts(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Names and values under each other, for people."""
        known = [(name, value) for name, value in pairs if value]
        width = max((len(name) for name, _ in known), default=0)
        for name, value in known:
            self.line(f"{name:<{width}}  {visible(value)}")

    def warn(self, text: str) -> None:
        """A line on stderr, also with JSON."""
        if not self.quiet:
            complain([(f"warning: {text}", "yellow")])

    def error(self, error: BackupdError) -> None:
        """Message, detail and hint on stderr; with JSON also the document ``{"error": ...}`` on stdout."""
        complain_of(error)
        if not self._lost and not self._is_open:
            # The error is reported already; that stdout fails too is no news that anybody could use.
            with contextlib.suppress(BackupdError, typer.Exit):
                self.document({"error": error_as_json(error)})


def error_as_json(error: BackupdError) -> dict[str, Any]:
    """``message``, ``detail``, ``hint``, ``type``; and each problem or damage where there are several."""
    document: dict[str, Any] = {
        "message": error.message,
        "detail": error.detail,
        "hint": error.hint,
        "type": error.problem_type,
    }
    if isinstance(error, ConfigurationError):
        document["problems"] = [problem.as_json() for problem in error.problems]
    if isinstance(error, DamagedError):
        document["damages"] = list(error.damages)
    return document
