"""The part of a runbook that comes before anything is opened: is what lies here what was stored?

A sealed file proves nothing about who made it: everybody who has the public key can seal one. So the description of
each backup has to be signed by a key whose fingerprint the reader brings along, and every file beside it has to be the
one that the description names by its SHA-256. ``unpack.sh`` is run as root: it is never opened before that.
"""

from __future__ import annotations

from collections.abc import Sequence

from storage import layout

_SIGNED = r"""
: "${SIGNER:?the fingerprint of the key that signs these backups, from the page that you keep outside of this place}"
# signed_by_signer FILE: is FILE.sig a good signature of it, by SIGNER?
signed_by_signer() {
    said=$(gpg --batch --no-options --status-fd 1 --verify "$1.sig" "$1" 2> /dev/null) ||
        { echo "STOP: $1 is not signed, or it was altered, or the key of SIGNER is not in the key ring" >&2; exit 1; }
    if printf '%s\n' "$said" | grep -q '^.GNUPG:. REVKEYSIG '; then
        echo "STOP: $1 is signed with a key that was revoked" >&2; exit 1
    fi
    printf '%s\n' "$said" | awk '$2 == "VALIDSIG" { print $3; print $NF }' | grep -qixF -e "$SIGNER" ||
        { echo "STOP: $1 is signed by somebody else than SIGNER ($SIGNER)" >&2; exit 1; }
}
"""
_UNALTERED = r"""
# unaltered FOLDER: are the files of a backup those that its description names?
unaltered() {
    @signed@
    for part in body unpack runbook config; do
        named=$(sed -n 's/.*"'"$part"'":{\([^}]*\)}.*/\1/p' "$1/manifest.json")
        file=$(printf '%s' "$named" | sed -n 's/.*"name":"\([A-Za-z0-9._-]*\)".*/\1/p')
        digest=$(printf '%s' "$named" | sed -n 's/.*"sha256":"\([0-9a-f]*\)".*/\1/p')
        case $part$file in config) continue ;; esac # there is none
        printf '%s  %s\n' "$digest" "$1/$file" | sha256sum --check --strict --status ||
            { echo "STOP: $1/$file is not the file that was stored" >&2; exit 1; }
    done
}
"""
UNSIGNED = ("\n\nNothing of this server is signed: that its files are those that their description names is looked "
            "at, but whoever can write here can have made both.")
SIGNED = ("\n\nSet `SIGNER` to the fingerprint of the key that signs these backups (`export SIGNER=...`): from the "
          "page that is kept outside of this place (`backupd keys page` prints it), never from here. Descriptions that "
          "this key has not signed, and files that they do not name, stop this before anything is opened or run.")


def signature_check() -> str:
    """Shell that defines ``signed_by_signer``, which needs SIGNER."""
    return _SIGNED.lstrip("\n")


def first_look(server: str, chain: Sequence[str], *, signed: bool) -> str:
    """Shell that stops where a backup of ``chain`` is not what was stored."""
    look = 'signed_by_signer "$1/manifest.json"' if signed else 'echo "$1 is not signed" >&2'
    folders = [f'unaltered "$REPOSITORY/{layout.backup_folder(server, backup).rstrip("/")}"' for backup in chain]
    return "".join((signature_check() if signed else "", _UNALTERED.lstrip("\n").replace("@signed@", look),
                    *(f"{line}\n" for line in folders)))
