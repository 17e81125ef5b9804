# --- settings
set -eu
umask 022
: "${GNUPGHOME:?the GnuPG home with the private key}"
: "${DATADIR:?the empty or missing data directory to restore into}"
: "${SERVER:=@first@}"
: "${TO:=latest}"
: "${BASE:=/var/lib/backupd-recovery}"
: "${OWNER:=mysql}"
export GNUPGHOME
mkdir -p "$BASE/policies"
# shellcheck disable=SC2174 # its parent is there by then
mkdir -p -m 0700 "$BASE/old"
problem() { echo "PROBLEM: $*" >&2; }
@trust@
@place@

# --- folder
: "${REPOSITORY:?the path of the folder that holds this text}"
# shellcheck disable=SC2317 # one of three blocks stands in its place
names() { ls "$REPOSITORY/$1"; }
# shellcheck disable=SC2317 # one of three blocks stands in its place
fetch() { cat "$REPOSITORY/$1"; }

# --- s3_style
printf '[default]\ns3 =\n    addressing_style = %s\n' @style@ > "$BASE/aws-config"
export AWS_CONFIG_FILE="$BASE/aws-config"

# --- s3
PLACE=@place@
# shellcheck disable=SC2317 # one of three blocks stands in its place
names() { aws@options@ s3 ls "$PLACE$1" | awk '{sub("/$", ""); print $NF}'; }
# shellcheck disable=SC2317 # one of three blocks stands in its place
fetch() { aws@options@ s3 cp --only-show-errors "$PLACE$1" -; }

# --- sftp
: "${SFTP_KEY:?the private key that opens the host}"
: "${KNOWN_HOSTS:?the file with the key of the host}"
PLACE=@folder@
batch() { sftp -q -b - -i "$SFTP_KEY" -o "UserKnownHostsFile=$KNOWN_HOSTS" -P @port@ @target@; }
names() { printf 'ls -1 "%s/%s"\n' "$PLACE" "$1" | batch | sed 's|.*/||'; }
fetch() { printf 'get "%s/%s" "%s"\n' "$PLACE" "$1" "$BASE/fetched" | batch > /dev/null; cat "$BASE/fetched"; }

# --- versions
if [ -n "${SINCE:-}" ]; then
    PREFIX=@prefix@
    JSON_PREFIX=@json@
    export PREFIX JSON_PREFIX SINCE
    states() {
        TZ=UTC aws@options@ s3api list-object-versions --bucket @bucket@ --prefix "$PREFIX" --output text \
            --query "$1[].[Key,IsLatest,LastModified,VersionId,'$1']" | grep -E "	$1\$" || true
    }
    { states Versions; states DeleteMarkers; } | LC_ALL=C sort -t '	' -k1,1 -k2,2r -k3,3r > "$BASE/states.txt"
    awk -F '\t' -v deletions="$BASE/deletions.txt" -v copies="$BASE/copies.txt" '
        function flush() { if (batch != "") print "{\"Quiet\":true,\"Objects\":[" batch "]}" > deletions
                           batch = ""; number = 0 }
        function judge(   top, count, at, i) {
            if (rows == 0 || name ~ "^(@passing@)") return
            for (top = 1; top <= rows && kind[top] == "DeleteMarkers"; top++) continue
            if (top > rows) return
            if (top > 1) {
                at = when[top - 1] > when[top] ? when[top - 1] : when[top]
                for (i = 1; at >= since && i < top; i++) {
                    batch = batch (batch == "" ? "" : ",") \
                        "{\"Key\":\"" ENVIRON["JSON_PREFIX"] name "\",\"VersionId\":\"" id[i] "\"}"
                    if (++number == 500) flush()
                }
            } else if (when[1] >= since && name ~ "^(@once@)") {
                for (i = 2; i <= rows; i++) if (kind[i] == "Versions" && when[i] < since) {
                    print name "\t" id[i] > copies
                    return
                }
            }
        }
        BEGIN { since = substr(ENVIRON["SINCE"], 1, 19); printf "" > deletions; printf "" > copies }
        $1 != key { judge(); rows = 0; key = $1; name = substr(key, length(ENVIRON["PREFIX"]) + 1) }
        { rows++; when[rows] = substr($3, 1, 19); id[rows] = $4; kind[rows] = $5 }
        END { judge(); flush() }' "$BASE/states.txt"
    while read -r batch; do
        printf '%s' "$batch" > "$BASE/batch.json"
        said=$(aws@options@ s3api delete-objects --bucket @bucket@ --delete "file://$BASE/batch.json" 2>&1) || true
        case $said in *rror*) problem "not everything came back: $said" ;; esac
    done < "$BASE/deletions.txt"
    while IFS='	' read -r name id; do
        aws@options@ s3api copy-object --bucket @bucket@ --key "$PREFIX$name" \
            --copy-source @source@"$name?versionId=$id" > /dev/null || problem "$name did not come back"
    done < "$BASE/copies.txt"
fi

# --- configuration
opened() {
    rm -rf "$BASE/old/new"
    fetch "@configurations@$1" > "$BASE/old/copy.gpg" &&
@trusted@
    gpg --batch --quiet --yes ${PASSPHRASE_FILE:+--pinentry-mode loopback --passphrase-file} \
        ${PASSPHRASE_FILE:+"$PASSPHRASE_FILE"} \
        --output "$BASE/old/copy.zst" --decrypt "$BASE/old/copy.gpg" &&
    zstd -q -f -d "$BASE/old/copy.zst" -o "$BASE/old/copy.tar" &&
    mkdir "$BASE/old/new" && tar -x -f "$BASE/old/copy.tar" -C "$BASE/old/new" && mv "$BASE/old/new" "$BASE/old/$2"
}
for copy in $(names @configurations@ | grep -E '^[0-9]{8}T[0-9]{6}Z-[0-9a-f]{12}[.]tar[.]zst[.]gpg$' |
        sort -r); do
    installation=${copy#*-}
    installation=${installation%%.*}
    if [ -e "$BASE/old/$installation" ]; then continue; fi
    if ! opened "$copy" "$installation"; then
        problem "@configurations@$copy cannot be opened; older ones are tried"
        continue
    fi
    echo "$BASE/old/$installation is the configuration of installation $installation, from ${copy%%-*}; it names:"
    # shellcheck disable=SC2043 # several servers stand there
    for server in @names@; do
        if grep -qswF -e "$server" "$BASE/old/$installation"/backupd.yaml "$BASE/old/$installation"/servers.d/*; then echo "- server $server"; fi
    done
@named@
    gpg --batch --quiet --import "$BASE/old/$installation/public-keys.asc" ||
        problem "its public keys are not imported"
done
rm -rf "$BASE/old/copy.gpg" "$BASE/old/copy.gpg@sig@" "$BASE/old/copy.zst" "$BASE/old/copy.tar" "$BASE/old/new"
if [ -z "$(ls "$BASE/old")" ]; then problem "no configuration could be opened: import the public keys yourself"; fi

# --- trusted_copy
    fetch "@folder@$1@sig@" > "$BASE/old/copy.gpg@sig@" && (signed_by_signer "$BASE/old/copy.gpg") &&

# --- named_copy
    if ! grep -qF -e "$SIGNER" "$BASE/old/$installation/backupd.yaml"; then
        problem "$BASE/old/$installation does not name SIGNER: it is older than that key. Trust no other key it names"
    fi

# --- recovery
cat > "$BASE/backupd.yaml" <<END
catalog: sqlite:///$BASE/catalog.db
spool: $BASE/spool
policies: $BASE/policies
servers: @servers@
destinations: @destinations@
encryption: @encryption@
restore:
  gnupg_home: $GNUPGHOME
  scratch: {path: $BASE/scratch}
  ${PASSPHRASE_FILE:+passphrase_file: $PASSPHRASE_FILE}
END
cat > "$BASE/policies/unsigned.yaml" <<END
@policy@
END
cat > "$BASE/policies/signed.yaml" <<END
@signed_policy@
END
export BACKUPD_CONFIG="$BASE/backupd.yaml"

# --- what
backupd catalog rebuild --from @destination@ --into-existing || problem "not all of it could be taken in: see above"
backupd backups || problem "the backups cannot be listed"
backupd timeline "$SERVER" || problem "there is no timeline of $SERVER"

# --- restore
backupd plan "$SERVER" --to "$TO"
backupd restore "$SERVER" --to "$TO" --datadir "$DATADIR" ${THAW:+--thaw "$THAW"}

# --- newest
full() { case $1 in *.*) echo "${1%Z}" ;; *) echo "${1%Z}.000000" ;; esac; }
told() { sed -n 's/.*"'"$1"'":"\([^"]*\)".*/\1/p' "$BASE/manifest.json"; }
: "${BACKUP:=}"
for id in $(names "@server_folders@$SERVER/" | grep -E '^[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}$' | sort -r); do
    if [ -n "$BACKUP" ]; then break; fi
    if ! fetch "@server_folders@$SERVER/$id/manifest.json" > "$BASE/manifest.json" ||
            [ "$(told server)/$(told backup)" != "$SERVER/$id" ]; then
        problem "backup $id cannot be read; older ones are tried"
    elif [ "$(told kind)" != logical ] && { [ "$TO" = latest ] ||
            ! LC_ALL=C expr "x$(full "$(told finished_at)")" \> "x$(full "$TO")" > /dev/null; }; then
        BACKUP=$id
    fi
done
[ -n "$BACKUP" ] || { problem "no physical backup of $SERVER had ended by $TO"; exit 1; }
echo "backup $BACKUP of $SERVER is restored, to $TO"
fetch "@server_folders@$SERVER/$BACKUP/RUNBOOK.md" > "$BASE/RUNBOOK.md"

# --- unaltered
# shellcheck disable=SC2291 # part of the text as it was always written
case $SERVER in
@servers@)
    fetch "servers/$SERVER/$BACKUP/manifest.json" > "$BASE/manifest.json"
    fetch "servers/$SERVER/$BACKUP/@sig@" > "$BASE/@sig@"
    signed_by_signer "$BASE/manifest.json"
    [ "$(told server)/$(told backup)" = "$SERVER/$BACKUP" ] ||
        { echo "STOP: what lies there as $BACKUP of $SERVER is another backup" >&2; exit 1; }
    digest=$(sed -n 's/.*"runbook":{\([^}]*\)}.*/\1/p' "$BASE/manifest.json" |
        sed -n 's/.*"sha256":"\([0-9a-f]*\)".*/\1/p')
    printf '%s  %s\n' "$digest" "$BASE/RUNBOOK.md" | sha256sum --check --strict --status ||
        { echo "STOP: the runbook of $BACKUP is not the one that was stored" >&2; exit 1; }
    grep -q '^CHECKED=' "$BASE/RUNBOOK.md" || [ "${UNCOMPARED:-}" = yes ] ||
        { echo "STOP: the runbook of $BACKUP is of an earlier version. It opens objects and binary logs as root and"             "does not compare them with what was signed. Restore with backupd, which does; or, where nobody else"             "could write here, set UNCOMPARED=yes" >&2; exit 1; } ;;
esac

# --- fetch_named
: "${REPOSITORY:=$BASE/repository}"
export REPOSITORY
awk '/^##/ { here = index($0, "### From @destination@ (@kind@)") == 1 }
    /^[`][`][`]/ { on = here && /shell$/; next }
    on' "$BASE/RUNBOOK.md" > "$BASE/fetch.sh"
[ -s "$BASE/fetch.sh" ] || { problem "the runbook does not tell how to fetch from @destination@"; exit 1; }
sh "$BASE/fetch.sh"

# --- sftp_options
export SSH_KEY="$SFTP_KEY" SSH_OPTIONS="-o UserKnownHostsFile=$KNOWN_HOSTS"

# --- steps
awk '/^[`][`][`]/ { on = /sh$/; next } on' "$BASE/RUNBOOK.md" > "$BASE/steps.sh"
export REPOSITORY DATADIR OWNER TO
sh "$BASE/steps.sh"
