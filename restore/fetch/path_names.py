"""Are the paths of a backup fit to be written below a folder? A manifest is data from elsewhere: judged, not
obeyed."""

from __future__ import annotations

import os
import tempfile
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from backupd.model.errors import DamagedError, RefusedError
from backupd.model.manifest import Body, Entry, Header

_SHOWN = 20


def check_entries(header: Header, body: Body) -> None:
    """Refuse a manifest that contradicts itself or would write outside its folder. Raises DamagedError, all
    named."""
    known = {stored.name for stored in header.objects}
    problems = [*_hostile(body.entries), *_doubled(body.entries)]
    for entry in body.entries:
        missing = [name for name in entry.objects if name not in known]
        if missing:
            problems.append(f"{entry.path!r}: object {missing[0]} is not in the manifest's list")
        if not entry.bundle and sum(part.size for part in entry.parts) != entry.size:
            problems.append(f"{entry.path!r}: its parts do not add up to its {entry.size} bytes")
        if len(entry.parts) == 1 and entry.parts[0].sha256 != entry.sha256:
            problems.append(f"{entry.path!r}: the digest of its only part is not its own")
    if problems:
        raise DamagedError(
            f"backup {header.backup_id} cannot be restored: {len(problems)} impossible entries",
            problems,
            hint="nothing was written; restore from another backup or another destination's copy",
        )


def _hostile(entries: Iterable[Entry]) -> list[str]:
    problems = []
    for entry in entries:
        components = entry.path.split("/")
        if "\0" in entry.path or any(component in ("", ".", "..") for component in components):
            problems.append(f"{entry.path!r}: would be written outside its folder")
        elif any(len(os.fsencode(component)) > 255 for component in components):
            problems.append(f"{entry.path!r}: a name longer than 255 bytes")
    return problems


def _doubled(entries: Sequence[Entry]) -> list[str]:
    problems = []
    files: set[str] = set()
    for entry in entries:
        if entry.path in files:
            problems.append(f"{entry.path!r}: listed twice")
        files.add(entry.path)
    for path in files:
        folder = path.rpartition("/")[0]
        while folder:
            if folder in files:
                problems.append(f"{path!r}: {folder!r} is a file and a folder at once")
            folder = folder.rpartition("/")[0]
    return problems


def check_collisions(entries: Iterable[Entry], folder: Path) -> None:
    """Names that differ only by case cannot live on every file system. Raises RefusedError naming the pairs.

    ``folder`` exists and is writable; a probe file is made in it and removed.
    """
    if is_case_sensitive(folder):
        return
    pairs = colliding(entry.path for entry in entries)
    if pairs:
        raise RefusedError(
            f"{folder} does not tell upper from lower case, but {len(pairs)} names differ by nothing else",
            detail="\n".join(f"{one!r} and {other!r}" for one, other in pairs[:_SHOWN]),
            hint="restore onto a file system that is case-sensitive, as the source's was",
        )


def colliding(paths: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of files, or of folders, that are one and the same where case does not count."""
    seen: dict[str, str] = {}
    pairs: list[tuple[str, str]] = []
    for path in paths:
        whole = path
        while whole:
            folded = unicodedata.normalize("NFC", whole).casefold()
            other = seen.setdefault(folded, whole)
            if other != whole and (other, whole) not in pairs:
                pairs.append((other, whole))
            whole = whole.rpartition("/")[0]
    return pairs


def is_case_sensitive(folder: Path) -> bool:
    with tempfile.NamedTemporaryFile(prefix=".backupd-case-probe-", dir=folder) as probe:
        path = Path(probe.name)
        return not path.with_name(path.name.upper()).exists()
