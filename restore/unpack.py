"""``unpack.sh``: makes a backup's files from its objects with sh, gpg, zstd, tar and sha256sum alone.

It names every file of the backup, so it is stored sealed; the runbook in the clear says how to open it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from backupd.model.manifest import Entry

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

# o OBJECT: open an object, still compressed, into $work/zst
o() {{
    gpg --quiet --yes --output "$work/zst" --decrypt -- "$repository/objects/$(printf %.2s "$1")/$1" ||
        fail "object $1 cannot be opened"
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
        zstd -q -d -c "$work/zst" >> "./$file" || fail "object $object cannot be unpacked"
    done
}}
h() {{
    if command -v fallocate > /dev/null; then fallocate --dig-holes "./$file" || :; fi
}}
# b OBJECT: a bundle of small files
b() {{
    o "$1"
    zstd -q -d -c "$work/zst" > "$work/tar" || fail "bundle $1 cannot be unpacked"
    tar -xf "$work/tar" || fail "bundle $1 is not a tar archive"
}}

"""

_TAIL = """
sha256sum -c --quiet "$work/sums" || fail 'files differ from what was backed up'
rm -rf "$work"
echo '{files} files, {size} bytes: all exactly as backed up'
"""

_END = "END_OF_THE_LIST_OF_FILES"
_PARTS_IN_A_LINE = 8


def render_unpack(backup_id: str, entries: Iterable[Entry]) -> bytes:
    """The script for ``entries``. Names may hold any byte but NUL; they stay the bytes that they were."""
    listed = sorted(entries, key=lambda entry: entry.path)
    lines = [
        *_folders(listed),
        *_bundles(listed),
        *(line for entry in listed for line in _file(entry)),
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


def _bundles(entries: Iterable[Entry]) -> Iterator[str]:
    return (f"b {name}" for name in dict.fromkeys(entry.bundle for entry in entries if entry.bundle))


def _file(entry: Entry) -> Iterator[str]:
    if entry.bundle:
        return
    yield f"n {quote(entry.path)}"
    names = [part.object for part in entry.parts]
    for first in range(0, len(names), _PARTS_IN_A_LINE):
        yield f"p {' '.join(names[first : first + _PARTS_IN_A_LINE])}"
    if entry.sparse:
        yield "h"


def _sum(entry: Entry) -> str:
    """A line for ``sha256sum -c``: a leading backslash says that backslashes and line ends in the name are
    escaped."""
    escaped = entry.path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == entry.path else chr(92)}{entry.sha256}  ./{escaped}"
