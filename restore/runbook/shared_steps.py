"""``unpack.sh``: makes a backup's files from its objects with sh, gpg, zstd, tar and sha256sum alone.

It names every file of the backup, so it is stored sealed; the runbook in the clear says how to open it. Whoever can
write to the place can seal other objects, and it is run as root: so no object is opened that is not, byte for byte, the
one that was stored.

The part of a runbook that comes before anything is opened: is what lies here what was stored?

A sealed file proves nothing about who made it: everybody who has the public key can seal one. So the description of
each backup has to be signed by a key whose fingerprint the reader brings along, and every file beside it has to be the
one that the description names by its SHA-256. ``unpack.sh`` is run as root: it is never opened before that. What is
signed is signed wherever it lies, so a description counts only in the folder that it tells of.

The private servers of a runbook: shell that writes their option file, starts them and waits until they answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from backupd.engine.instance.backup_files import KEY_PLUGIN, PLAIN_VALUE, PLUGIN_DIR
from backupd.engine.instance.launch import FROM_BACKUP, Options, ServerConfig, option_text, options_for_copy
from backupd.engine.toolset import row_for
from backupd.model.manifest import Entry, StoredObject
from backupd.model.server_facts import Flavour, ServerInfo
from storage.contract import layout

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


_SIGNED = r"""
: "${SIGNER:?the fingerprint of the key that signs these backups, from the page that you keep outside of this place}"
# signed_by_signer FILE [NAME]: is FILE.sig a good signature of it, by SIGNER? NAME: where it was copied from
signed_by_signer() {
    shown=${2:-$1}
    said=$(gpg --batch --no-options --status-fd 1 --verify "$1.sig" "$1" 2> /dev/null) ||
        { echo "STOP: $shown is not signed, or it was altered, or the key of SIGNER is not in the key ring" >&2
          exit 1; }
    if printf '%s\n' "$said" | grep -q '^.GNUPG:. REVKEYSIG '; then
        echo "STOP: $shown is signed with a key that was revoked" >&2; exit 1
    fi
    printf '%s\n' "$said" | awk '$2 == "VALIDSIG" { print $3; print $NF }' | grep -qixF -e "$SIGNER" ||
        { echo "STOP: $shown is signed by somebody else than SIGNER ($SIGNER)" >&2; exit 1; }
}
"""
_UNALTERED = r"""
CHECKED=$(mktemp -d)
# unaltered FOLDER: are the files of a backup those that its description names, and is it this backup's own? What is run
# of them lies in $CHECKED from then on: whoever can write to the place could change it there after this look.
unaltered() {
    kept=$CHECKED/${1##*/} of=${1%/*}
    mkdir "$kept"
    cp "$1/manifest.json" "$kept"
    @signed@
    if test "$(says backup "$kept/manifest.json") $(says server "$kept/manifest.json")" != "${1##*/} ${of##*/}"; then
        echo "STOP: $1/manifest.json is that of another backup" >&2; exit 1
    fi
    for part in body unpack runbook config; do
        named=$(sed -n 's/.*"'"$part"'":{\([^}]*\)}.*/\1/p' "$kept/manifest.json")
        file=$(printf '%s' "$named" | sed -n 's/.*"name":"\([A-Za-z0-9._-]*\)".*/\1/p')
        digest=$(printf '%s' "$named" | sed -n 's/.*"sha256":"\([0-9a-f]*\)".*/\1/p')
        case $part$file in config) continue ;; esac # there is none
        look=$1/$file
        case $part in unpack) look=$kept/$file; cp "$1/$file" "$look" ;; esac
        printf '%s  %s\n' "$digest" "$look" | sha256sum --check --strict --status ||
            { echo "STOP: $1/$file is not the file that was stored" >&2; exit 1; }
    done
}
says() { sed -n 's/.*[{,]"'"$1"'":"\([^"]*\)".*/\1/p' "$2"; }
"""
_SIGNER_LOOKS = """
    if test -e "$1/manifest.json.sig"; then cp "$1/manifest.json.sig" "$kept"; fi
    signed_by_signer "$kept/manifest.json" "$1/manifest.json"
"""
UNSIGNED = (
    "\n\nNothing of this server is signed: that its files are those that their description names is looked "
    "at, but whoever can write here can have made both."
)
SIGNED = (
    "\n\nSet `SIGNER` to the fingerprint of the key that signs these backups (`export SIGNER=...`): from the "
    "page that is kept outside of this place (`backupd keys page` prints it), never from here. Descriptions that "
    "this key has not signed, and files that they do not name, stop this before anything is opened or run."
)


def signature_check() -> str:
    """Shell that defines ``signed_by_signer``, which needs SIGNER."""
    return _SIGNED.lstrip("\n")


def first_look(server: str, chain: Sequence[str], *, signed: bool) -> str:
    """Shell that stops where a backup of ``chain`` is not what was stored; ``$CHECKED/ID`` holds its ``unpack.sh``."""
    look = _SIGNER_LOOKS.strip() if signed else 'echo "$1 is not signed" >&2'
    folders = [f'unaltered "$REPOSITORY/{layout.backup_folder(server, backup).rstrip("/")}"' for backup in chain]
    return "".join(
        (
            signature_check() if signed else "",
            _UNALTERED.lstrip("\n").replace("@signed@", look),
            *(f"{line}\n" for line in folders),
        )
    )


# Stand for the operator's paths while commands are rendered: nothing in them needs quoting.
WORK, DATADIR, STORE = Path("/BACKUPD-WORK"), Path("/BACKUPD-DATADIR"), Path("/BACKUPD-STORE")
OWNER = "BACKUPD-OWNER"
_VARIABLES = {str(STORE): "$STORE", str(DATADIR): "$DATADIR", str(WORK): "$WORK", OWNER: "$OWNER"}
_NONE: Options = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Programs:
    """Names: of the server, and of what runs a statement, administrates, checks tables and prints a binary log."""

    server: str
    client: str
    admin: str
    check: str
    reader: str


def programs_of(info: ServerInfo) -> Programs:
    server = row_for(info.flavour, info.version).server[0]
    if info.flavour is Flavour.MARIADB:
        return Programs(server, "mariadb", "mariadb-admin", "mariadb-check", "mariadb-binlog")
    return Programs(server, "mysql", "mysqladmin", "mysqlcheck", "mysqlbinlog")


def with_variables(text: str) -> str:
    """The operator's variables in place of our stand-ins, quoted for the shell unless they are within a document."""
    for path, variable in _VARIABLES.items():
        text = text.replace(path, variable)
    return text


def known_lines(names: Sequence[str], folder: str) -> str:
    """Shell that prints what is believed of the option file in a backup, as ``backupcnf.known_options`` does."""
    known = "|".join(name.replace("-", "[-_]") for name in names)
    return (
        f"""sed -n -E '/^({known}) *= *{PLAIN_VALUE}$/p; /^plugin[-_]load([-_]add)? *= *{KEY_PLUGIN} *$/p;"""
        f""" \\|^plugin[-_]dir *= *"?{PLUGIN_DIR}"?$|p;"""
        f""" /^(loose[-_])?file[-_]key[-_]management[-_]/p' "{folder}/backup-my.cnf\""""
    )


def option_file(
    programs: Programs,
    info: ServerInfo,
    *,
    datadir: Path,
    found: Path,
    own_account: bool = False,
    more: Mapping[str, str | None] = _NONE,
) -> str:
    """Shell that writes ``$WORK/run/my.cnf`` of a server on ``datadir`` that nobody can reach and that reaches nobody.

    ``found``: the folder with the tool's own option file; ``own_account``: with accounts and events, and an init file,
    instead of letting everybody in; ``more``: options that win over those of the source."""
    config = ServerConfig(
        program=programs.server,
        datadir=datadir,
        directory=WORK / "run",
        skip_grants=not own_account,
        own_account=own_account,
        options={**options_for_copy(WORK, info.variables), **more},
    )
    text = option_text(config).removeprefix("[mysqld]\n")
    for letter in "\\$`":
        text = text.replace(letter, "\\" + letter)
    return f"""\
mkdir -p "$WORK/run/tmp"
{{
    echo '[mysqld]'
    # A server that was unpacked into some folder does not find its texts by itself.
    program=$(readlink -f "$(command -v {programs.server})")
    for base in "${{program%/*/*}}" "${{program%/*}}"; do
        for folder in share share/mysql share/mariadb; do
            case $program in /usr/* | /bin/* | /sbin/*) continue ;; esac
            if [ -f "$base/$folder/english/errmsg.sys" ]; then
                printf 'basedir = %s\nlc_messages_dir = %s\n' "$base" "$base/$folder"
                break 2
            fi
        done
    done
    {known_lines(FROM_BACKUP, with_variables(str(found)))}
    cat << END_OF_OPTIONS
{with_variables(text).rstrip()}
END_OF_OPTIONS
}} > "$WORK/run/my.cnf"
chown -R "$OWNER:" "$WORK/run"
"""


def begun(programs: Programs, client: str, *, environment: str = "") -> str:
    """Shell that starts the server of ``option_file`` as ``$server``; ``client``: options with which it is asked."""
    return f"""\
{environment}{programs.server} --defaults-file="$WORK/run/my.cnf" --user="$OWNER" &
server=$!
until {programs.admin} {client} ping 2> /dev/null; do
    kill -0 "$server" || {{ tail -n 20 "$WORK/run/error.log" >&2; exit 1; }}
    sleep 1
done
"""
