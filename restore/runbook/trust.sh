# --- signed_by_signer
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

# --- unaltered
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

# --- look
    if test -e "$1/manifest.json.sig"; then cp "$1/manifest.json.sig" "$kept"; fi
    signed_by_signer "$kept/manifest.json" "$1/manifest.json"
