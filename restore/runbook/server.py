"""The private servers of a runbook: shell that writes their option file, starts them and waits until they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from backupd.engine.instance.backup_files import KEY_PLUGIN, PLAIN_VALUE, PLUGIN_DIR
from backupd.engine.instance.launch import FROM_BACKUP, Options, ServerConfig, option_text, options_for_copy
from backupd.engine.toolset import row_for
from backupd.model.server_facts import Flavour, ServerInfo

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
