"""The runbook beside a logical backup: how to load it by hand, with gpg, zstd, tar, sh and the database's own client.

It is stored in the clear, so it names no schema, no table and no address. Its shell blocks are one script that is cut
into steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from backupd.model.manifest import Body, Header
from backupd.model.server_facts import Flavour
from backupd.model.table import DumpFacts
from backupd.model.text import format_size, format_time
from restore.runbook.destinations import NOWHERE, render_places
from restore.runbook.shared_steps import SIGNED, UNSIGNED, first_look
from storage.contract import layout
from storage.contract.config import DestinationConfig


def render_logical_runbook(
    header: Header,
    body: Body,
    *,
    destinations: Sequence[str],
    places: Mapping[str, DestinationConfig] = NOWHERE,
    signed: bool = False,
) -> str:
    """Markdown. ``destinations``: the names of those that hold this backup; ``places``: what is known of the
    destinations that hold it or will; ``signed``: are manifests signed, so that others are refused?"""
    facts, info = body.facts, body.facts.server
    dump = facts.dump or DumpFacts(())
    mariadb = info.flavour is Flavour.MARIADB
    later = sum(1 for table in dump.dumped if table.position is not None)
    values = {
        "backup": header.backup_id,
        "server": header.server,
        "began": format_time(header.started_at),
        "ended": format_time(header.finished_at),
        "version": f"{info.flavour} {info.version}",
        "position": f"{facts.position.file}:{facts.position.pos}" if facts.position.file else "none (no binary log)",
        "gtid": facts.position.gtid or "none",
        "tool": f"{facts.tool.name} {facts.tool.version}",
        "size": format_size(header.stats.bytes_source),
        "files": header.stats.files,
        "tables": len(dump.dumped),
        "trusted": first_look(header.server, (header.backup_id,), signed=signed),
        "why_trusted": SIGNED if signed else UNSIGNED,
        "missing": header.tables_missing,
        "recipients": ", ".join(header.recipients),
        "destinations": ", ".join(destinations),
        "client": "mariadb" if mariadb else "mysql",
        "unpack": layout.UNPACK,
        "set": header.table_set or "all of the policy",
        "later": f"\n{later} tables were dumped after the others and have a later position of their own; the sealed "
        "body of the backup names them.\n"
        if later
        else "",
        "places": render_places(
            header.server, (header.backup_id,), places, stored=sum(item.size for item in header.objects)
        ),
        "missing_words": "\n**Tables are missing in this backup:** they could not be read. The catalog and the sealed "
        "body name them.\n"
        if header.tables_missing
        else "",
    }
    return re.sub(r"@([a-z_]+)@", lambda found: str(values[found[1]]), _TEXT)


_TEXT = """\
# Loading tables of @server@ from logical backup @backup@, by hand

| | |
|---|---|
| backup | `@backup@`, logical, of server `@server@`, set of tables: @set@ |
| taken | from @began@ to @ended@ |
| position | `@position@`, GTID `@gtid@` |
| server | @version@ |
| made with | @tool@ |
| size | @tables@ tables in @files@ files, @size@; missing: @missing@ |
| sealed for | @recipients@ |
| stored at | @destinations@ |
@missing_words@@later@
You need the private key for one of these fingerprints, `gpg`, `zstd`, `tar`, a POSIX `sh` with the usual tools, and the
client `@client@`. Nothing here needs backupd, and nothing changes the repository.

Work in a shell of its own (type `sh`): the first step makes it stop at the first error. The steps follow each other in
that one shell.

@places@## 1. Settings, and is everything here?

Set `REPOSITORY` and `WORK` first, for example with `export REPOSITORY=/srv/backups WORK=/var/tmp/tables`, and
`GNUPGHOME` if the private key is not in your own keyring. `CLIENT` is the client with the options that it needs to
reach the server that the tables are to be loaded into, as an account that may create them.@why_trusted@

```sh
set -eu
umask 077
LC_ALL=C
export LC_ALL
: "${REPOSITORY:?the folder that holds objects and servers}"
: "${WORK:?an empty or missing folder with room for all files}"
: "${CLIENT:=@client@}"

for program in gpg zstd tar sha256sum ${CLIENT%% *}; do
    command -v "$program" > /dev/null || { echo "$program is missing" >&2; exit 1; }
done
test -z "$(ls -A "$WORK" 2> /dev/null)" || { echo "$WORK is not empty" >&2; exit 1; }
@trusted@
mkdir -p "$WORK"
```

## 2. Decrypt and unpack

`unpack.sh` makes every file from the sealed objects, and compares each of both with its SHA-256.

```sh
gpg --quiet --output "$WORK/unpack.sh.zst" --decrypt "$CHECKED/@backup@/@unpack@"
zstd -q -d "$WORK/unpack.sh.zst" -o "$WORK/unpack.sh"
sh "$WORK/unpack.sh" "$REPOSITORY" "$WORK/data"
rm -r "$CHECKED"
```

## 3. Choose what to load

Each table has a folder `tables/SCHEMA/TABLE` in `$WORK/data`; in names, punctuation, spaces and the like are written as
`%` and two hex digits. To load some tables only, set `ONLY` to their folders, separated by spaces; `INTO` to load all
of them into one other schema, which must exist. A table that exists is not touched: loading stops there.

```sh
cd "$WORK/data"
: "${ONLY:=$(ls -d tables/*/*)}"
: "${INTO:=}"
MODE=NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION,ALLOW_INVALID_DATES

# decoded NAME: the name that the folder stands for, in $name
decoded() {
    rest=$1
    name=
    while case $rest in *%*) true ;; *) false ;; esac; do
        name=$name${rest%%"%"*}
        rest=${rest#*"%"}
        hex=${rest%"${rest#??}"}
        rest=${rest#??}
        byte=$(printf "\\\\$(printf %03o "0x$hex")x")
        name=$name${byte%x}
    done
    name=$name$rest
}
# load FILE SCHEMA
load() {
    test -e "$1" || return 0
    client --skip-force --database="$2" < "$1" || { echo "$1 was not loaded" >&2; exit 1; }
}
# client OPTION...: bodies keep their line ends and comments
client() {
    $CLIENT --binary-mode --comments --default-character-set=utf8mb4 --max-allowed-packet=1G \\
        --init-command="SET SESSION foreign_key_checks = 0, unique_checks = 0, sql_mode = '$MODE'" "$@"
}
# into FOLDER: the schema to load into, in $name
into() {
    decoded "$(basename "$1")"
    test -z "$INTO" || name=$INTO
}
define() {
    into "$(dirname "$1")"
    load "$1/definition.sql" "$name"
}
fill() {
    into "$(dirname "$1")"
    for rows in "$1"/data-*.sql; do
        load "$rows" "$name"
    done
}
is_sequence() {
    grep -q "^CREATE SEQUENCE" "$1/definition.sql"
}
```

## 4. Load

Schemas, sequences (tables may take values from them), definitions, rows; then what refers to them. Triggers come after
the rows, so that they do not fire.

```sh
if test -z "$INTO"; then
    for schema in schemas/*/; do
        load "$schema/create.sql" ""
    done
fi
for table in $ONLY; do
    if is_sequence "$table"; then
        define "$table"
        fill "$table"
    fi
done
for table in $ONLY; do
    if ! is_sequence "$table"; then define "$table"; fi
done
for table in $ONLY; do
    if ! is_sequence "$table"; then fill "$table"; fi
done
for table in $ONLY; do
    into "$(dirname "$table")"
    load "$table/triggers.sql" "$name"
done
```

## 5. Routines, views and events

Only for whole schemas. Make the accounts first that are named as definers: a view that reads the view of a missing one
is refused. Views may read those of other schemas, so they are loaded again and again, as long as more of them can be
made; one that did not work on the source is a comment in its file. Events run as soon as they are there, where the
server's scheduler is on.

```sh
for schema in schemas/*/; do
    into "$schema"
    load "$schema/routines.sql" "$name"
done

# views: makes what can be made; what was refused is in $WORK/refused
views() {
    for schema in schemas/*/; do
        test -e "$schema/views.sql" || continue
        into "$schema"
        client --force --database="$name" < "$schema/views.sql" 2>&1 || { cat "$WORK/said" >&2; exit 1; }
    done > "$WORK/said"
    grep "^ERROR" "$WORK/said" > "$WORK/refused" || true
}
views
if grep "^ERROR 1050 " "$WORK/refused" >&2; then
    echo "something has the name of a view" >&2
    exit 1
fi
last=
while grep -v "^ERROR 1050 " "$WORK/refused" > "$WORK/missing"; do
    test "$(wc -l < "$WORK/missing")" != "$last" || break
    last=$(wc -l < "$WORK/missing")
    views
done

for schema in schemas/*/; do
    into "$schema"
    load "$schema/events.sql" "$name"
done
if test -s "$WORK/missing"; then
    cat "$WORK/missing" >&2
    echo "these views were not loaded, everything else was" >&2
    exit 1
fi
```

## Afterwards

Foreign keys were not checked while rows were loaded: where only some tables were loaded, look for rows without their
parents. Remove `$WORK`: it holds the tables in the clear.

The binary log from the position above on holds what happened to the tables since; `binlogs/@server@/` in the repository
has what was archived of it.
"""
