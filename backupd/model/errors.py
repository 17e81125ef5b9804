"""Every error that a user can meet, as one tree.

    BackupdError
    ├── UsageError              wrong call, exit 2
    ├── ConfigurationError      configuration or policy files, all problems at once, exit 2
    ├── RefusedError            a rule forbids it; nothing was changed
    │   └── BusyError           somebody else is at it; later it may work
    ├── UnauthenticatedError    nobody knows who asks: no token, or one that counts no more
    ├── ForbiddenError          who asks is known, and may not do this
    ├── NotFoundError           no such server, backup, destination
    │   └── UnknownNameError    nothing is called so: it was typed wrong, exit 2
    │       └── UnknownTableError   of the tables that somebody named for one dump
    ├── ToolError               an external program failed
    │   └── ToolMissingError
    ├── StreamError             a tool's output is not what its format promises
    │   └── TablesChangedError  tables were changed under the tool: another attempt may succeed
    ├── ServerError             the database server refused or went away
    ├── KeyUnusableError        an OpenPGP key is missing, expired or cannot decrypt
    ├── DestinationError        a destination failed (retryable unless it says otherwise)
    │   ├── DestinationFullError
    │   ├── UnreachableError    the destination does not answer
    │   ├── ObjectMissingError
    │   ├── ArchivedError       it is in an archive class and has to be thawed first
    │   └── LockedError         the destination lets nobody delete it yet
    │       └── MissingRightsError  these credentials never may
    ├── CatalogError            the catalog's database failed or is not ours to read
    ├── DamagedError            stored data is not what was stored; names every damaged thing
    └── CancelledError          somebody asked to stop

A message says what happened, ``detail`` carries evidence (a tool's last lines), ``hint`` the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backupd.model.document import Document

OTHER_BACKUP = (
    "every file is what was stored (its digest agrees), so another copy is the same: choose another backup "
    "(--to backup:ID)"
)
"""The hint where what was fetched, and compared on the way, is not what a backup should be."""


class BackupdError(Exception):
    """Base of all errors shown to users.

    Attributes: ``message`` (one sentence), ``detail`` (evidence, may span lines), ``hint`` (what to do next);
    ``retryable``: repeating the same job may succeed; ``exit_code`` of the command line; ``problem_type``: the
    stable last word of the problem+json type.
    """

    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1
    problem_type: ClassVar[str] = "failure"

    def __init__(self, message: str, *, detail: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message]
        if self.detail:
            lines.append(f"detail: {self.detail}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    @property
    def line(self) -> str:
        """Message and detail in one line, to be one of several."""
        return ": ".join(" ".join(part.split()) for part in (self.message, self.detail) if part)


class UsageError(BackupdError):
    exit_code = 2
    problem_type = "usage"


@dataclass(frozen=True, slots=True)
class Problem(Document):
    """One thing wrong in a file: where (file, 1-based line, dotted field) and what."""

    file: str
    line: int | None
    field: str
    message: str

    def __str__(self) -> str:
        location = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{location}: {self.field}: {self.message}" if self.field else f"{location}: {self.message}"


class ConfigurationError(BackupdError):
    """Raised once with every problem found."""

    exit_code = 2
    problem_type = "configuration"

    def __init__(self, problems: Sequence[Problem], *, hint: str = "") -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        super().__init__(
            f"{count} problem{'s' if count != 1 else ''} in the configuration",
            detail="\n".join(str(problem) for problem in self.problems),
            hint=hint,
        )


class RefusedError(BackupdError):
    problem_type = "refused"


class MisnamedError(RefusedError):
    """A server, or somebody between it and here, gave a binary log a name that none has."""

    def __init__(
        self,
        name: str,
        address: str,
        why: str = "backupd requested no binary log of that name",
    ) -> None:
        super().__init__(
            f"the server at {address}, or a host between them, named a file that must not be written: {name[:200]!r}",
            detail=why,
            hint="nothing of it was used. Find out who answers at that address, and set `tls: verify-full` for the "
            "server in the configuration, so that nobody can intercept the connection; backupd retries",
        )


class ElsewhereError(RefusedError):
    """A physical backup was asked for where the server's files are not, and no policy plans one."""


class BusyError(RefusedError):
    retryable = True


class UnauthenticatedError(BackupdError):
    problem_type = "unauthenticated"


class ForbiddenError(BackupdError):
    problem_type = "forbidden"


class NotFoundError(BackupdError):
    problem_type = "not-found"


class DumpsOnlyError(NotFoundError):
    """A whole server was asked for of which dumps are taken only: nothing is broken."""


class UnknownNameError(NotFoundError):
    """A name that neither the configuration nor the catalog has: it was typed wrong. ``kind``, ``name``: of what is in
    the catalog, by which the command line finds those that resemble it."""

    exit_code = 2

    def __init__(self, message: str, *, detail: str = "", hint: str = "", kind: str = "", name: str = "") -> None:
        super().__init__(message, detail=detail, hint=hint)
        self.kind = kind
        self.name = name


class UnknownTableError(UnknownNameError):
    """Tables were named for one dump, and the server has none of them: nothing is broken."""


def unknown(kind: str, name: str, *, lists: str, what: str = "those that are known") -> UnknownNameError:
    """Nothing of this ``kind`` has this id; ``lists``: the command that lists ``what`` there is."""
    return UnknownNameError(f"there is no {kind} {name}", hint=f"`backupd {lists}` lists {what}", kind=kind, name=name)


class ToolError(BackupdError):
    retryable = True
    problem_type = "tool-failed"


class ToolMissingError(ToolError):
    retryable = False
    problem_type = "tool-missing"


class StreamError(BackupdError):
    retryable = True
    problem_type = "broken-stream"


class TablesChangedError(StreamError):
    """``as_full``: an increment would fail again, or would be worthless; a full backup is right."""

    problem_type = "tables-changed"

    def __init__(self, message: str, *, detail: str = "", hint: str = "", as_full: bool = False) -> None:
        super().__init__(message, detail=detail, hint=hint)
        self.as_full = as_full


class ServerError(BackupdError):
    retryable = True
    problem_type = "server"


class KeyUnusableError(BackupdError):
    problem_type = "key"


class DestinationError(BackupdError):
    retryable = True
    problem_type = "destination"


class DestinationFullError(DestinationError):
    """``destination``: its name."""

    problem_type = "destination-full"

    def __init__(self, message: str, *, detail: str = "", hint: str = "", destination: str = "") -> None:
        super().__init__(message, detail=detail, hint=hint)
        self.destination = destination


class UnreachableError(DestinationError):
    """Nobody answers there. It takes a while until that is known, so it is remembered for a while, too."""


class ObjectMissingError(DestinationError):
    retryable = False
    problem_type = "object-missing"


class ArchivedError(DestinationError):
    """The bytes are there, in an archive class: they can be read some time after a thaw was asked for."""

    retryable = False
    problem_type = "archived"


class LockedError(DestinationError):
    """An object lock, a retention rule of the destination, or missing rights keep it from being deleted. Nothing is
    lost."""

    retryable = False
    problem_type = "locked"


class MissingRightsError(LockedError):
    """The credentials may not delete there: that does not end without a change of rights. ``hint`` names the rights."""


class CatalogError(BackupdError):
    """The catalog's database failed, is damaged, locked or of another version. No backup is harmed by it."""

    problem_type = "catalog"


class DamagedError(BackupdError):
    """Stored data is missing, truncated or altered. ``damages`` holds one line per damaged thing."""

    problem_type = "damaged"

    def __init__(self, message: str, damages: Sequence[str], *, hint: str = "") -> None:
        self.damages = tuple(damages)
        shown = list(self.damages[:50])
        if len(self.damages) > len(shown):
            shown.append(f"... and {len(self.damages) - len(shown)} more")
        super().__init__(message, detail="\n".join(shown), hint=hint)


class UnrestorableError(DamagedError):
    """All that is stored of a backup is whole, and what it was prepared to is not what its server had: each restore of
    it ends so."""


class TamperedError(DamagedError):
    """It reads well, and is not what this installation stored: somebody wrote it, or put it there."""


class NewerFormatError(DamagedError):
    """A later version of this program wrote it. Nothing is known of what it names, so nothing of that is touched."""

    def __init__(self, where: str, form: str) -> None:
        super().__init__(
            f"{where} was written by a newer version of backupd",
            [f"{where}: format {form[:120]!r}"],
            hint="use that version, or a later one, with this destination; this version changes and deletes nothing "
            "there",
        )


class CancelledError(BackupdError):
    problem_type = "cancelled"
