"""``RECOVER.md``: what a destination says to somebody who has nothing but it and a private key.

It is in the clear, so it names servers and backups (as the keys there do), and no schema, table, account or secret.
Its shell blocks are one script that is cut into steps. Of a bucket with versions it also says how files that somebody
deleted or overwrote come back with ``aws``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from shlex import quote
from typing import Any
from urllib.parse import quote as in_url

from backupd.transfer.records.authenticity import Signing
from restore.runbook.shared_steps import signature_check
from storage import layout
from storage.config import DestinationConfig, FilesystemConfig, S3Config, SftpConfig

_PASSING = (layout.INTENTS, layout.PINS, layout.SWEEPS, layout.TOMBSTONES, layout.QUARANTINE, layout.MARKS)
_ONCE = (layout.OBJECTS, layout.SERVERS)
"""Here nothing is ever written twice, so what was put over it is somebody else's."""
_OF_ITS_HOST = frozenset(
    {"path", "credentials_file", "profile", "ca_file", "key_file", "known_hosts", "max_upload", "max_download"}
)
"""Fields that say something about the host that was lost only."""
_VARIABLE = re.compile(r"@@([A-Z_]+)@@")


@dataclass(frozen=True, slots=True)
class _Place:
    """How to get at a destination. ``settings``: shell that defines ``names FOLDER`` and ``fetch KEY``; ``fields``:
    its configuration, with ``@@NAME@@`` for variables of the shell; ``by_hand``: shell that brings what the
    runbook in ``BASE`` needs to the folder ``REPOSITORY``, where it is not one."""

    words: str
    needs: str
    settings: str
    fields: Mapping[str, Any]
    by_hand: str = ""


def recover_text(
    name: str,
    config: DestinationConfig,
    newest: Mapping[str, str],
    *,
    recipients: Sequence[str],
    signing: Signing | None = None,
    signed: Collection[str] = (),
) -> str:
    """Markdown. ``name``: what the destination is called; ``newest``: of each server with backups there the id of the
    newest; ``recipients``: fingerprints of the keys of which each opens everything; ``signed``: servers of which only
    what is signed is believed, as ``signing`` says."""
    place = _place(name, config)
    servers = sorted(newest)
    encryption: dict[str, Any] = {"gnupg_home": "@@GNUPGHOME@@", "recipients": list(recipients)}
    if signing is not None:
        encryption["trusted_signers"] = list(signing.trusted)
    policy = {"physical": {"full": "every 365d"}, "destinations": {"required": [name]}}
    return _TEXT.format(
        version=version("backupd"),
        words=place.words,
        needs=place.needs,
        settings=place.settings.strip(),
        recipients=_bullets(recipients),
        first=servers[0] if servers else "NAME",
        name=name,
        signers=_SIGNERS.format(keys=_bullets(signing.trusted)) if signing is not None else "",
        trust=_TRUST.format(functions=signature_check()) if signing is not None else "",
        unaltered=_UNALTERED.format(
            servers=" | ".join(map(quote, sorted(signed))), sig=layout.signature_key("manifest.json")
        )
        if signing is not None and signed
        else "",
        rows=rows_of(newest),
        destinations=_here({name: place.fields}),
        encryption=_here(encryption),
        policy=_here(policy),
        sig=layout.SIGNATURE,
        named=_NAMED_COPY if signed else "",
        trusted=_TRUSTED_COPY.format(folder=layout.CONFIGURATIONS, sig=layout.SIGNATURE) if signed else "",
        signed_policy=_here({**policy, "signed": True}),
        servers=_here(
            {
                server: {"policy": "signed" if server in signed else "unsigned", "owner": "@@OWNER@@"}
                for server in servers
            }
        ),
        cold=_COLD.format(classes=" or ".join(classes)) if (classes := _cold(config)) else "",
        names=" ".join(quote(server) for server in servers) or '""',
        back=recover_versions_text(config, name) if isinstance(config, S3Config) else "",
        cold_by_hand=_COLD_BY_HAND if _cold(config) else "",
        by_hand=place.by_hand.strip(),
        server_folders=layout.SERVERS,
        configurations=layout.CONFIGURATIONS,
        catalogs=layout.CATALOGS,
    )


def rows_of(newest: Mapping[str, str]) -> str:
    """The list of the newest backup of each server, as the text has it."""
    return (
        "\n".join(f"- `{server}`: `{layout.runbook_key(server, newest[server])}`" for server in sorted(newest))
        or "- none"
    )


def rows_in(text: str) -> dict[str, str]:
    """What ``rows_of`` made of it."""
    found = re.findall(r"^- `([^`]+)`: `([^`]+)`$", text, re.MULTILINE)
    return {server: owner[1] for server, key in found if (owner := layout.backup_of(key)) is not None}


def made_by(text: bytes) -> str | None:
    """The version that wrote a text; None where it names none."""
    found = re.search(rb"made by backupd (\S+?)[.] ", text)
    return found[1].decode() if found else None


def _place(name: str, config: DestinationConfig) -> _Place:
    fields = {
        name: value
        for name, value in config.model_dump(mode="json", exclude_unset=True).items()
        if name not in _OF_ITS_HOST and value is not None
    }
    if isinstance(config, FilesystemConfig):
        return _Place(
            "This folder",
            "- this folder, whose path you set as `REPOSITORY`",
            _FOLDER,
            {**fields, "path": "@@REPOSITORY@@"},
        )
    if isinstance(config, S3Config):
        return _Place(
            f"This bucket, `{config.bucket}`" + (f", below `{config.prefix}/`," if config.prefix else ""),
            "- `aws`, and credentials that may list and read this bucket, where it finds them: "
            "`AWS_SHARED_CREDENTIALS_FILE`, or `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, are exported"
            + (", and `AWS_CA_BUNDLE`, since its certificate is of an authority of its own" if config.ca_file else ""),
            (_S3_STYLE.format(style=config.addressing) if config.addressing != "auto" else "")
            + _S3.format(
                place=quote(f"s3://{config.bucket}/" + (f"{config.prefix}/" if config.prefix else "")),
                options="".join(
                    f" {option} {quote(value)}"
                    for option, value in (("--endpoint-url", config.endpoint_url), ("--region", config.region))
                    if value
                ),
            ),
            fields,
            _BY_HAND.format(name=name, kind="S3"),
        )
    return _Place(
        f"This folder, `{config.path}` on {config.host},",
        "- `sftp`, a private SSH key that this host lets in, whose path you set as `SFTP_KEY`, and a file with the "
        "host's own key, whose path you set as `KNOWN_HOSTS`",
        _SFTP.format(target=quote(f"{config.user}@{config.host}"), port=config.port, folder=quote(_batch(config.path))),
        {**_required(config), **fields, "key_file": "@@SFTP_KEY@@", "known_hosts": "@@KNOWN_HOSTS@@"},
        _SFTP_BY_HAND + _BY_HAND.format(name=name, kind="SFTP"),
    )


def _cold(config: DestinationConfig) -> list[str]:
    """Archive classes that hold something which has to be thawed before it can be read."""
    used = {config.storage_class, config.binlog_storage_class} if isinstance(config, S3Config) else set()
    return sorted(f"`{name}`" for name in used & {"GLACIER", "DEEP_ARCHIVE"})


def _required(config: SftpConfig) -> Mapping[str, Any]:
    return {"path": config.path}


def _batch(path: str) -> str:
    """A path inside double quotes, as sftp reads them in a batch."""
    return path.replace("\\", "\\\\").replace('"', '\\"')


def _bullets(words: Sequence[str]) -> str:
    return "\n".join(f"- `{word}`" for word in words)


def _here(document: Mapping[str, Any]) -> str:
    """As JSON, which YAML understands, inside a here-document that replaces variables."""
    text = json.dumps(document, ensure_ascii=False, sort_keys=True)
    return _VARIABLE.sub(r"$\1", re.sub(r"([\\$`])", r"\\\1", text))


def recover_versions_text(config: S3Config, name: str) -> str:
    """Markdown, with a block of shell that does something only where ``SINCE`` is set. It begins where ``BASE`` and
    ``problem`` are there. ``name``: what the destination is called."""
    prefix = f"{config.prefix}/" if config.prefix else ""
    options = "".join(
        f" {option} {quote(value)}"
        for option, value in (("--endpoint-url", config.endpoint_url), ("--region", config.region))
        if value
    )
    text = _RECOVER_VERSIONS
    for word, value in (
        ("options", options),
        ("bucket", quote(config.bucket)),
        ("prefix", quote(prefix)),
        ("name", name),
        ("json", quote(json.dumps(prefix)[1:-1])),
        ("source", quote(in_url(f"{config.bucket}/{prefix}"))),
        ("passing", "|".join(_PASSING)),
        ("once", "|".join(_ONCE)),
    ):
        text = text.replace(f"@{word}@", value)
    return text


_FOLDER = """
: "${REPOSITORY:?the path of the folder that holds this text}"
names() { ls "$REPOSITORY/$1"; }
fetch() { cat "$REPOSITORY/$1"; }
"""

_S3 = """
PLACE={place}
names() {{ aws{options} s3 ls "$PLACE$1" | awk '{{sub("/$", ""); print $NF}}'; }}
fetch() {{ aws{options} s3 cp --only-show-errors "$PLACE$1" -; }}
"""

_S3_STYLE = """
printf '[default]\\ns3 =\\n    addressing_style = %s\\n' {style} > "$BASE/aws-config"
export AWS_CONFIG_FILE="$BASE/aws-config"
"""

_SFTP = """
: "${{SFTP_KEY:?the private key that opens the host}}"
: "${{KNOWN_HOSTS:?the file with the key of the host}}"
PLACE={folder}
batch() {{ sftp -q -b - -i "$SFTP_KEY" -o "UserKnownHostsFile=$KNOWN_HOSTS" -P {port} {target}; }}
names() {{ printf 'ls -1 "%s/%s"\\n' "$PLACE" "$1" | batch | sed 's|.*/||'; }}
fetch() {{ printf 'get "%s/%s" "%s"\\n' "$PLACE" "$1" "$BASE/fetched" | batch > /dev/null; cat "$BASE/fetched"; }}
"""

_BY_HAND = """
: "${{REPOSITORY:=$BASE/repository}}"
export REPOSITORY
awk '/^##/ {{ here = index($0, "### From {name} ({kind})") == 1 }}
    /^[`][`][`]/ {{ on = here && /shell$/; next }}
    on' "$BASE/RUNBOOK.md" > "$BASE/fetch.sh"
[ -s "$BASE/fetch.sh" ] || {{ problem "the runbook does not tell how to fetch from {name}"; exit 1; }}
sh "$BASE/fetch.sh"
"""

_SFTP_BY_HAND = """
export SSH_KEY="$SFTP_KEY" SSH_OPTIONS="-o UserKnownHostsFile=$KNOWN_HOSTS"
"""

_COLD_BY_HAND = """\
Where that is in an archive class, the first call asks for it and stops; repeat it when it was thawed. """

_SIGNERS = """
Descriptions of backups here are signed, and so is this text. Whoever can write here can write another text, another
signature and another key: **before you follow one line of it**, take the page that `backupd keys page` printed, which
is kept elsewhere, and run the command that stands there. `SIGNER` is the fingerprint on that page. Only signatures of
these keys count:

{keys}

Copies of the configuration are signed in the same way, each in the file beside it whose name ends in `.sig`; one that
`SIGNER` has not signed is not opened. Nothing of them is used by the steps below but public keys. Their names are not
signed: somebody may have given an old copy the name of a newer one.
"""

_TRUST = """\
{functions}export SIGNER
"""

_UNALTERED = """\
case $SERVER in
{servers})
    fetch "servers/$SERVER/$BACKUP/manifest.json" > "$BASE/manifest.json"
    fetch "servers/$SERVER/$BACKUP/{sig}" > "$BASE/{sig}"
    signed_by_signer "$BASE/manifest.json"
    [ "$(told server)/$(told backup)" = "$SERVER/$BACKUP" ] ||
        {{ echo "STOP: what lies there as $BACKUP of $SERVER is another backup" >&2; exit 1; }}
    digest=$(sed -n 's/.*"runbook":{{\\([^}}]*\\)}}.*/\\1/p' "$BASE/manifest.json" |
        sed -n 's/.*"sha256":"\\([0-9a-f]*\\)".*/\\1/p')
    printf '%s  %s\\n' "$digest" "$BASE/RUNBOOK.md" | sha256sum --check --strict --status ||
        {{ echo "STOP: the runbook of $BACKUP is not the one that was stored" >&2; exit 1; }}
    grep -q '^CHECKED=' "$BASE/RUNBOOK.md" || [ "${{UNCOMPARED:-}}" = yes ] ||
        {{ echo "STOP: the runbook of $BACKUP is of an earlier version. It opens objects and binary logs as root and" \
            "does not compare them with what was signed. Restore with backupd, which does; or, where nobody else" \
            "could write here, set UNCOMPARED=yes" >&2; exit 1; }} ;;
esac
"""

_TRUSTED_COPY = """\
    fetch "{folder}$1{sig}" > "$BASE/old/copy.gpg{sig}" && (signed_by_signer "$BASE/old/copy.gpg") &&
"""
_NAMED_COPY = """\
    if ! grep -qF -e "$SIGNER" "$BASE/old/$installation/backupd.yaml"; then
        problem "$BASE/old/$installation does not name SIGNER: it is older than that key. Trust no other key it names"
    fi
"""

_COLD = """
Some of what is needed may lie in the class {classes}, where it cannot be read before it was thawed, which takes hours
and costs money: the plan says how many, and how much. With `THAW` set to `expedited`, `standard` or `bulk` the restore
asks for it and waits.
"""

_RECOVER_VERSIONS = r"""
If somebody deleted or overwrote files here, and the bucket keeps versions, they are still there. Take the credentials
of whoever did it away first. Then set `SINCE` to the time from which on nothing that was done here is to be believed,
such as `2026-11-21T09:41:03Z`: this lets everything be seen that was deleted since then, also what had rightly expired,
and the earlier version of what was overwritten. It needs the rights `s3:ListBucketVersions`, `s3:GetObjectVersion`,
`s3:PutObject` and `s3:DeleteObjectVersion`; without `SINCE` it does nothing. (With the configuration of step 3,
`backupd bring-back @name@ --since TIME` shows, and with `--yes` does, the same more exactly: by recorded digests, and
without what had been marked deleted before.)

```sh
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
```
"""

_TEXT = """\
# Recovery from nothing but this

{words} holds backups of MySQL or MariaDB servers, made by backupd {version}. Everything in it but this text, the
runbooks, and lists of sizes and digests is encrypted. This text is written anew after each backup and after each copy
of one to here; `backupd verify` compares it with what lies beside it. It holds no secret, and no key is needed to read
it.

## What you need

{needs}
- the **private key** that belongs to one of these, in a GnuPG home whose path you set as `GNUPGHOME`; without one of
  them nothing here can be opened by anybody:

{recipients}

- `gpg`, `zstd` and `tar`
- a host with the database server of the release that a backup was taken from, and the tool that took it; each
  backup's `RUNBOOK.md` names them
- for the way that needs the least work: backupd, of version {version} or newer
{signers}
The newest backup of each server, with its runbook:

{rows}

## With backupd

As root. All that the recovery itself makes lies in `BASE`; the server's data comes to `DATADIR`, which has to be empty
or missing, on a file system with room for it. `SERVER` is one of the names above. `TO` is `latest`, or a time such as
`2026-11-21T09:41:03Z`.

### 1. Settings

```sh
set -eu
umask 022
: "${{GNUPGHOME:?the GnuPG home with the private key}}"
: "${{DATADIR:?the empty or missing data directory to restore into}}"
: "${{SERVER:={first}}}"
: "${{TO:=latest}}"
: "${{BASE:=/var/lib/backupd-recovery}}"
: "${{OWNER:=mysql}}"
export GNUPGHOME
mkdir -p "$BASE/policies"
mkdir -p -m 0700 "$BASE/old"
problem() {{ echo "PROBLEM: $*" >&2; }}
{trust}{settings}
```

If the key has a passphrase, write it into a file that only root can read, and set `PASSPHRASE_FILE` to its path.
{back}
### 2. What was configured

The configuration that was lost, with its policies and the public keys. Look into it for what the servers need besides
their data: it is put below `BASE/old`, and is not used by the steps below. Names of copies say when each was made, and
by which installation: several may share a place, and of each the newest copy that opens is taken. What cannot be opened
is named, and the steps go on.

```sh
opened() {{
    rm -rf "$BASE/old/new"
    fetch "{configurations}$1" > "$BASE/old/copy.gpg" &&
{trusted}    gpg --batch --quiet --yes ${{PASSPHRASE_FILE:+--pinentry-mode loopback --passphrase-file}} \\
        ${{PASSPHRASE_FILE:+"$PASSPHRASE_FILE"}} \\
        --output "$BASE/old/copy.zst" --decrypt "$BASE/old/copy.gpg" &&
    zstd -q -f -d "$BASE/old/copy.zst" -o "$BASE/old/copy.tar" &&
    mkdir "$BASE/old/new" && tar -x -f "$BASE/old/copy.tar" -C "$BASE/old/new" && mv "$BASE/old/new" "$BASE/old/$2"
}}
for copy in $(names {configurations} | grep -E '^[0-9]{{8}}T[0-9]{{6}}Z-[0-9a-f]{{12}}[.]tar[.]zst[.]gpg$' |
        sort -r); do
    installation=${{copy#*-}}
    installation=${{installation%%.*}}
    if [ -e "$BASE/old/$installation" ]; then continue; fi
    if ! opened "$copy" "$installation"; then
        problem "{configurations}$copy cannot be opened; older ones are tried"
        continue
    fi
    echo "$BASE/old/$installation is the configuration of installation $installation, from ${{copy%%-*}}; it names:"
    for server in {names}; do
        if grep -qwF -e "$server" "$BASE/old/$installation/backupd.yaml"; then echo "- server $server"; fi
    done
{named}    gpg --batch --quiet --import "$BASE/old/$installation/public-keys.asc" ||
        problem "its public keys are not imported"
done
rm -rf "$BASE/old/copy.gpg" "$BASE/old/copy.gpg{sig}" "$BASE/old/copy.zst" "$BASE/old/copy.tar" "$BASE/old/new"
if [ -z "$(ls "$BASE/old")" ]; then problem "no configuration could be opened: import the public keys yourself"; fi
```

### 3. A configuration for the recovery

Nothing is deleted under it, and no backup is taken as long as the service does not run.

```sh
cat > "$BASE/backupd.yaml" <<END
catalog: sqlite:///$BASE/catalog.db
spool: $BASE/spool
policies: $BASE/policies
servers: {servers}
destinations: {destinations}
encryption: {encryption}
restore:
  gnupg_home: $GNUPGHOME
  scratch: {{path: $BASE/scratch}}
  ${{PASSPHRASE_FILE:+passphrase_file: $PASSPHRASE_FILE}}
END
cat > "$BASE/policies/unsigned.yaml" <<END
{policy}
END
cat > "$BASE/policies/signed.yaml" <<END
{signed_policy}
END
export BACKUPD_CONFIG="$BASE/backupd.yaml"
```

### 4. Find out what there is

What is damaged or missing is named, and everything else is taken in.

```sh
backupd catalog rebuild --from {name} --into-existing || problem "not all of it could be taken in: see above"
backupd backups || problem "the backups cannot be listed"
backupd timeline "$SERVER" || problem "there is no timeline of $SERVER"
```

### 5. Restore
{cold}
```sh
backupd plan "$SERVER" --to "$TO"
backupd restore "$SERVER" --to "$TO" --datadir "$DATADIR" ${{THAW:+--thaw "$THAW"}}
```

Start the database server on `DATADIR`, and look at it. The other servers come back in the same way, with another
`SERVER` and `DATADIR`. Afterwards make a new installation out of what is below `BASE/old`, and rebuild its catalog in
the same way.

## Without backupd

Each backup has a `RUNBOOK.md`, which restores it with `gpg`, `zstd`, `tar`, `awk`, `sh` and the database's own
programs, and with `TO` rolls it forward to a later moment with the binary logs: those of the newest backups are named
above, and the others lie beside them, one folder for each backup. Folders are named by the time of the backup, in UTC.

After step 1, the settings, this takes the newest physical backup that had ended by `TO` (or the one that `BACKUP`
names) and does what its runbook says, with everything that the runbook explains: read it, above all where something
stops. What comes from elsewhere, the backup and all binary logs of the server, is put into `BASE`, which needs room for
it. {cold_by_hand}The private key must be one that `gpg` can use by itself, or asks for the passphrase of.

```sh
full() {{ case $1 in *.*) echo "${{1%Z}}" ;; *) echo "${{1%Z}}.000000" ;; esac; }}
told() {{ sed -n 's/.*"'"$1"'":"\\([^"]*\\)".*/\\1/p' "$BASE/manifest.json"; }}
: "${{BACKUP:=}}"
for id in $(names "{server_folders}$SERVER/" | grep -E '^[0-9]{{8}}T[0-9]{{6}}Z-[0-9a-f]{{8}}$' | sort -r); do
    if [ -n "$BACKUP" ]; then break; fi
    if ! fetch "{server_folders}$SERVER/$id/manifest.json" > "$BASE/manifest.json" ||
            [ "$(told server)/$(told backup)" != "$SERVER/$id" ]; then
        problem "backup $id cannot be read; older ones are tried"
    elif [ "$(told kind)" != logical ] && {{ [ "$TO" = latest ] ||
            ! LC_ALL=C expr "x$(full "$(told finished_at)")" \\> "x$(full "$TO")" > /dev/null; }}; then
        BACKUP=$id
    fi
done
[ -n "$BACKUP" ] || {{ problem "no physical backup of $SERVER had ended by $TO"; exit 1; }}
echo "backup $BACKUP of $SERVER is restored, to $TO"
fetch "{server_folders}$SERVER/$BACKUP/RUNBOOK.md" > "$BASE/RUNBOOK.md"
{unaltered}{by_hand}
awk '/^[`][`][`]/ {{ on = /sh$/; next }} on' "$BASE/RUNBOOK.md" > "$BASE/steps.sh"
export REPOSITORY DATADIR OWNER TO
sh "$BASE/steps.sh"
```

Copies of the catalog lie in `{catalogs}`, the newest name last. Names say when, by which installation, and of which of
its catalogs: one that was begun anew knows less than older copies of another. Decrypted and unpacked
(`gpg -d FILE | zstd -d > catalog.db`) each is an SQLite database; `SELECT id, server, kind, finished_at FROM backups`
lists what there was.
"""
