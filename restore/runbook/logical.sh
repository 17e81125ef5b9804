# --- settings
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

# --- unpack
gpg --quiet --output "$WORK/unpack.sh.zst" --decrypt "$CHECKED/@backup@/@unpack@"
zstd -q -d "$WORK/unpack.sh.zst" -o "$WORK/unpack.sh"
sh "$WORK/unpack.sh" "$REPOSITORY" "$WORK/data"
rm -r "$CHECKED"

# --- choose
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
        # shellcheck disable=SC2059 # the format is the byte
        byte=$(printf "\\$(printf %03o "0x$hex")x")
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
    $CLIENT --binary-mode --comments --default-character-set=utf8mb4 --max-allowed-packet=1G \
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

# --- load
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

# --- rest
for schema in schemas/*/; do
    into "$schema"
    load "$schema/routines.sql" "$name"
done

# views: makes what can be made; what was refused is in $WORK/refused
views() {
    # shellcheck disable=SC2094 # written by the loop, read after it failed
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
