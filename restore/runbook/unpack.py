"""``unpack.sh``: makes a backup's files from its objects with sh, gpg, zstd, tar and sha256sum alone.

It names every file of the backup, so it is stored sealed; the runbook in the clear says how to open it. Whoever can
write to the place can seal other objects, and it is run as root: so no object is opened that is not, byte for byte, the
one that was stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from backupd.model.manifest import Entry, StoredObject

_HEAD = """\
#!/bin/sh
# Makes the files of backup {backup} from its sealed objects.
#
#     sh unpack.sh REPOSITORY FOLDER
#
# REPOSITORY holds objects/ and is only read. FOLDER must be empty or missing; it gets every file of the
# backup, as it was copied from the server, not yet prepared. Needs gpg with the private key, zstd, tar and
# sha256sum.
set -eu
umask 077
LC_ALL=C
export LC_ALL

fail() {{
    echo "unpack.sh: $*" >&2
    exit 1
}}

[ $# -eq 2 ] || fail 'usage: sh unpack.sh REPOSITORY FOLDER'
case $1 in /*) repository=$1 ;; *) repository=$PWD/$1 ;; esac
[ -d "$repository/objects" ] || fail "$repository holds no objects"
mkdir -p -- "$2"
cd -- "$2"
[ -z "$(ls -A)" ] || fail "$2 is not empty"
work=.unpacking
mkdir "$work"

# o OBJECT: open an object, still compressed, into $work/zst; behind its name stands the rest of the SHA-256 with which
# it was stored. It is copied first, so that what is opened is what was looked at.
o() {{
    name=$(printf %.81s "$1")
    cp -- "$repository/objects/$(printf %.2s "$1")/$name" "$work/sealed" || fail "object $name is missing"
    printf '%s  %s\n' "${{1#*-}}" "$work/sealed" | sha256sum -c --status ||
        fail "object $name is not what was stored: fetch it from another place"
    gpg --quiet --yes --output "$work/zst" --decrypt -- "$work/sealed" || fail "object $name cannot be opened"
}}
# n FILE: a new file; p OBJECT...: append parts to it; h: let its empty blocks be holes again, where that is
# possible
n() {{
    file=$1
    : > "./$file"
}}
p() {{
    for object do
        o "$object"
        zstd -q -d -c "$work/zst" >> "./$file" || fail "object $name cannot be unpacked"
    done
}}
h() {{
    if command -v fallocate > /dev/null; then fallocate --dig-holes "./$file" || :; fi
}}
# b OBJECT: a bundle of small files
b() {{
    o "$1"
    zstd -q -d -c "$work/zst" > "$work/tar" || fail "bundle $name cannot be unpacked"
    tar -xf "$work/tar" || fail "bundle $name is not a tar archive"
}}

"""

_TAIL = """
sha256sum -c --quiet "$work/sums" || fail 'files differ from what was backed up'
rm -rf "$work"
echo '{files} files, {size} bytes: all exactly as backed up'
"""

_END = "END_OF_THE_LIST_OF_FILES"
_PARTS_IN_A_LINE = 8
_TOLD = 16
"""Digits of its SHA-256 with which an object's name ends."""


def render_unpack(backup_id: str, entries: Iterable[Entry], stored: Iterable[StoredObject]) -> bytes:
    """The script for ``entries``, which lie in the objects ``stored``. Names may hold any byte but NUL; they stay the
    bytes that they were."""
    listed = sorted(entries, key=lambda entry: entry.path)
    known = {item.name: f"{item.name[:-_TOLD]}{item.sha256}" for item in stored}
    lines = [
        *_folders(listed),
        *(f"b {known[name]}" for name in dict.fromkeys(entry.bundle for entry in listed if entry.bundle)),
        *(line for entry in listed for line in _file(entry, known)),
        f"cat > \"$work/sums\" << '{_END}'",
        *(_sum(entry) for entry in listed),
        _END,
    ]
    script = (
        _HEAD.format(backup=backup_id)
        + "\n".join(lines)
        + "\n"
        + _TAIL.format(files=len(listed), size=sum(entry.size for entry in listed))
    )
    return script.encode("utf-8", "surrogateescape")


def quote(text: str) -> str:
    """``text`` as one word of a POSIX shell, whatever is in it."""
    return "'" + text.replace("'", "'\\''") + "'"


def _folders(entries: Iterable[Entry]) -> Iterator[str]:
    folders = {entry.path.rpartition("/")[0] for entry in entries}
    return (f"mkdir -p ./{quote(folder)}" for folder in sorted(folders) if folder)


def _file(entry: Entry, known: Mapping[str, str]) -> Iterator[str]:
    if entry.bundle:
        return
    yield f"n {quote(entry.path)}"
    names = [known[part.object] for part in entry.parts]
    for first in range(0, len(names), _PARTS_IN_A_LINE):
        yield f"p {' '.join(names[first : first + _PARTS_IN_A_LINE])}"
    if entry.sparse:
        yield "h"


def _sum(entry: Entry) -> str:
    """A line for ``sha256sum -c``: a leading backslash says that backslashes and line ends in the name are
    escaped."""
    escaped = entry.path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == entry.path else chr(92)}{entry.sha256}  ./{escaped}"
