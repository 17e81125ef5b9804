"""What failures that are no errors of ours mean to the one who called: a sentence, and a next step."""

from __future__ import annotations

import errno
import os
import tempfile
import traceback

from backupd.model.errors import BackupdError

_HINTS = {
    errno.ENOSPC: "make room there, then call again",
    errno.EDQUOT: "make room there or raise the quota, then call again",
    errno.EACCES: "call as the user that owns it, or correct its permissions",
    errno.EPERM: "call as the user that owns it, or correct its permissions",
    errno.EROFS: "the file system is mounted read-only: dmesg tells whether an error made it so; the service may write "
    "only where its unit says (ReadWritePaths= in a drop-in: systemctl edit backupd)",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`, LimitNOFILE= of the unit)",
    errno.ENFILE: "raise the limit of open files of the system (sysctl fs.file-max)",
    errno.ENOMEM: "give this process more memory, then call again",
}
_MEMORY_HINT = "raise what limits it (`ulimit -v`, MemoryMax= of the unit) or end other programs, then call again"


def explained(error: Exception, what: str) -> BackupdError:
    """``error`` as one of ours; ``what`` names the command that met it."""
    if isinstance(error, BackupdError):
        return error
    if isinstance(error, MemoryError):
        return BackupdError(f"{what} failed: this process got no more memory", hint=_MEMORY_HINT)
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return BackupdError(
            f"{what} failed: the system refused a new thread",
            hint="raise what limits it (`ulimit -v`, `ulimit -u`, TasksMax= of the unit), then call again",
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
    place = f"{' -> '.join(paths)}: " if paths else ""
    hint = _HINTS.get(error.errno or 0, "")
    return BackupdError(f"{what} failed: {place}{reason_of(error)}", hint=hint or _kept(error))


def _first_line(error: Exception) -> str:
    from backupd.process.output import redact

    return redact((str(error).splitlines() or [""])[0])


def _kept(error: Exception) -> str:
    """Write the traceback to a private file (mkstemp makes it 0600); tells where it is."""
    from backupd.process.output import redact

    lines = "".join(traceback.format_exception(error)).splitlines()
    try:
        descriptor, path = tempfile.mkstemp(prefix="backupd-error-", suffix=".txt", dir=_lasting_folder())
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join(redact(line) for line in lines) + "\n")
    except OSError as problem:
        return f"report this; where it happened could not be written to a file: {reason_of(problem)}"
    except BackupdError as problem:
        return f"report this; where it happened could not be written to a file: {problem.message}"
    return f"report this with the file {path}, which says where it happened"


def _lasting_folder() -> str:
    """That for temporary files, or where these are read-only, as for the service, what stays of the runtime directory.
    Raises RefusedError."""
    from backupd.process.runtime import runtime_directory

    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return str(runtime_directory().parent)
