# --- settings
set -eu
umask 077
# shellcheck disable=SC2034 # for whoever reads it
BACKUP=@backup@
# shellcheck disable=SC2034 # of logs.sh
SERVER=@server@
: "${REPOSITORY:?the folder that holds objects and servers}"
: "${DATADIR:?the empty or missing data directory to restore into}"
: "${WORK:=$DATADIR.by-hand}"
: "${STORE:=$DATADIR.external}"
: "${OWNER:=mysql}"

for program in gpg zstd tar sha256sum @programs@; do
    command -v "$program" > /dev/null || { echo "$program is missing" >&2; exit 1; }
done
@tool@
@program@ --no-defaults --version | grep -F ' @series@.' ||
    { echo 'needs the server @series@' >&2; exit 1; }
# shellcheck disable=SC2010 # names are only counted
test -z "$(ls -A "$DATADIR" 2> /dev/null | grep -v -x 'lost+found')" || { echo "$DATADIR is not empty" >&2; exit 1; }
@trusted@
mkdir -m 0711 "$WORK"

# --- tool
@tool@ --no-defaults --version 2>&1 | grep -F ' @series@.' || { echo 'needs @tool@ @series@' >&2; exit 1; }

# --- unpack
gpg --quiet --output "$WORK/@folder@.sh.zst" --decrypt "$CHECKED/@backup@/@unpack@"
zstd -q -d "$WORK/@folder@.sh.zst" -o "$WORK/@folder@.sh"
sh "$WORK/@folder@.sh" "$REPOSITORY" "$WORK/@folder@"

# --- prepare
{
    echo '[mysqld]'
    @known@
} > "$WORK/known.cnf"
mv "$WORK/known.cnf" "$WORK/data/backup-my.cnf"
chown -R "$OWNER:" @folders@
prepared() {
    grep '[^[:space:]]' "$1" | tail -n 1 | grep 'completed OK!'
    if grep -E 'only scanned up to|when restoring a \(partial|\[ERROR\]|FATAL ERROR|not applied to the intended LSN' "$1" >&2; then exit 1; fi
}
@aside@

@prepared@

grep -h 'backup_type = @type@' "$WORK"/data/*_checkpoints

# --- aside
aside() {  # tables that were renamed, and whose old name is a new table's: the tool would remove their rows
    find "$1" -mindepth 2 -maxdepth 2 '(' -name '*.new' -o -name '*.del' ')' | while IFS= read -r file; do
        data="$WORK/data${file#"$1"}"
        data="${data%.*}.ibd"
        test -f "$data" || continue
        number=$((0x$(od -An -v -tx1 -j34 -N4 "$data" | tr -d ' ')))
        if grep -rqsx --include='*.ibd.meta' "space_id = $number" "$1"; then
            mv "$data" "${data%/*}/xtrabackup_tmp_#$number.ibd"
        fi
    done
}

# --- prepare_one
(@command@) 2> "$WORK/prepare-@number@.log" ||
    { tail "$WORK/prepare-@number@.log" >&2; exit 1; }
prepared "$WORK/prepare-@number@.log"

# --- outside
mkdir -p "$STORE/1"
find "$WORK/data" -mindepth 2 -maxdepth 2 -name '*@link@' | while IFS= read -r link; do
    schema=$(basename "$(dirname "$link")")
    table=$(basename "$link" @link@)
    mkdir -p "$STORE/1/$schema"
    mv "$WORK/data/$schema/$table.ibd" "$STORE/1/$schema/$table.ibd"
    printf %s "$STORE/1/$schema/$table.ibd" > "$link"
done
chown -R "$OWNER:" "$STORE"

# --- place
find "$WORK/data" -maxdepth 1 -type f \( -name backup-my.cnf -o -name 'xtrabackup_*' -o -name 'mariadb_backup_*' \) \
    -exec mv -t "$WORK" -- {} +
chown -R "$OWNER:" "$WORK/data"
find "$WORK/data" -type d -exec chmod 0700 {} +
find "$WORK/data" -type f -exec chmod 0660 {} +
mkdir -p "$DATADIR"
find "$WORK/data" -mindepth 1 -maxdepth 1 ! -name 'ibdata*' -exec mv -t "$DATADIR" -- {} +
mv -t "$DATADIR" -- "$WORK"/data/ibdata*
chown "$OWNER:" "$DATADIR"
chmod 0750 "$DATADIR"

# --- look
@options@
@begun@
@client@ -e '@forget@'
@check@ --default-character-set=utf8mb4 --all-databases --check --silent
@admin@ shutdown
# shellcheck disable=SC2154 # server: of begun
wait "$server"
rm -rf "$WORK"
