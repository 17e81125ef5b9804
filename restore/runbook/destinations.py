"""The section of a runbook about copies that lie elsewhere: how they come to this machine, with ``aws`` or ``sftp``.

Each place has shell blocks of its own (``shell``, where the steps of the restore are ``sh``): one place is chosen, the
steps are followed all. The blocks name endpoint, bucket, host and folder, and no secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from backupd.model.text import format_size
from restore.runbook.shared_steps import quote
from storage.contract import layout
from storage.contract.config import DestinationConfig, S3Config, SftpConfig

NOWHERE: Mapping[str, DestinationConfig] = MappingProxyType({})

_ARCHIVE_HOURS = {
    "GLACIER": "`Expedited` 5 minutes (where it is to be had), `Standard` 5 hours, `Bulk` 12 hours",
    "DEEP_ARCHIVE": "`Standard` 12 hours, `Bulk` 48 hours; `Expedited` is not to be had",
}
"""Classes that have to be thawed, and how long that takes."""


def render_places(server: str, chain: Sequence[str], places: Mapping[str, DestinationConfig], *, stored: int) -> str:
    """Markdown; empty where all ``places`` are folders. ``chain``: the backups that are needed; ``stored``: bytes that
    are fetched for them, at most."""
    away = [(name, place) for name, place in places.items() if isinstance(place, (S3Config, SftpConfig))]
    if not away:
        return ""
    sections = [
        _s3(name, place, server, chain) if isinstance(place, S3Config) else _sftp(name, place, server, chain)
        for name, place in away
    ]
    folders = [name for name in places if name not in dict(away)]
    text = _HEAD.replace("@size@", format_size(stored))
    beside = f" A copy in a folder ({', '.join(folders)}) is used where it is." if folders else ""
    return text.replace("@beside@", beside) + "\n".join(sections) + "\n"


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"@([a-z_]+)@", lambda found: values[found[1]], text)


def _s3(name: str, place: S3Config, server: str, chain: Sequence[str]) -> str:
    folder = f"{place.prefix}/" if place.prefix else ""
    cold = place.storage_class in _ARCHIVE_HOURS
    settings = [f"export AWS_DEFAULT_REGION={quote(place.region)}"] if place.region else []
    if place.addressing != "auto":
        settings += [
            "printf '[default]\\ns3 =\\n    addressing_style = %s\\n' "
            + place.addressing
            + ' > "$REPOSITORY/aws-config"',
            'export AWS_CONFIG_FILE="$REPOSITORY/aws-config"',
        ]
    endpoint = f" --endpoint-url {quote(place.endpoint_url)}" if place.endpoint_url else ""
    rights = "`s3:GetObject` and `s3:ListBucket`"
    notes = []
    if place.profile:
        notes.append(f"The profile was called `{place.profile}` (`export AWS_PROFILE=...`).")
    if place.ca_file:
        notes.append("The server's certificate was signed by an authority of its own: `export AWS_CA_BUNDLE=...`.")
    values = {
        "name": name,
        "bucket": place.bucket,
        "where": _s3_where(place),
        "chain": " ".join(chain),
        "server": server,
        "rights": rights + (" (to thaw: `s3:RestoreObject`)" if _thaws(place) else ""),
        "notes": "".join(f" {note}" for note in notes),
        "settings": "".join(f"{line}\n" for line in settings),
        "endpoint": endpoint,
        "from": quote(f"s3://{place.bucket}/{folder}".rstrip("/")),
        "bucket_word": quote(place.bucket),
        "prefix_word": quote(folder),
        "servers": layout.SERVERS,
        "logs": layout.binlogs_folder(server),
    }
    parts = [_S3_HEAD, _S3_LISTS]
    if cold:
        parts.append(
            _THAW.replace("@keys@", "objects-keys.txt")
            .replace("@what@", "The files of the backup")
            .replace("@class@", place.storage_class)
            .replace("@hours@", _ARCHIVE_HOURS[place.storage_class])
        )
    parts.append(_S3_FETCH.replace("@force@", " --force-glacier-transfer" if cold else ""))
    parts.append(_S3_LOGS_HEAD)
    logs = place.binlog_storage_class
    if logs in _ARCHIVE_HOURS:
        parts.append(_S3_LOG_KEYS)
        parts.append(
            _THAW.replace("@keys@", "log-keys.txt")
            .replace("@what@", "The logs")
            .replace("@class@", logs)
            .replace("@hours@", _ARCHIVE_HOURS[logs])
        )
    parts.append(_S3_LOGS.replace("@force@", " --force-glacier-transfer" if logs in _ARCHIVE_HOURS else ""))
    return _filled("\n".join(parts), values)


def _s3_where(place: S3Config) -> str:
    found = [f"bucket `{place.bucket}`"]
    if place.prefix:
        found.append(f"keys under `{place.prefix}/`")
    if place.region:
        found.append(f"region `{place.region}`")
    found.append(f"endpoint `{place.endpoint_url}`" if place.endpoint_url else "Amazon S3")
    return ", ".join(found)


def _thaws(place: S3Config) -> bool:
    return place.storage_class in _ARCHIVE_HOURS or place.binlog_storage_class in _ARCHIVE_HOURS


def _sftp(name: str, place: SftpConfig, server: str, chain: Sequence[str]) -> str:
    enter = f"cd {_batch_word(place.path)}"
    gets = "".join(
        f"get -r {layout.backup_folder(server, backup).rstrip('/')} {layout.SERVERS}{server}\n" for backup in chain
    )
    return _filled(
        _SFTP,
        {
            "name": name,
            "user": place.user,
            "host": place.host,
            "port": str(place.port),
            "path": place.path,
            "account": quote(f"{place.user}@{place.host}"),
            "enter": enter,
            "enter_word": quote(enter),
            "gets": gets,
            "server": server,
            "servers": layout.SERVERS,
            "chain": " ".join(chain),
            "logs": layout.binlogs_folder(server).rstrip("/"),
            "binlogs": layout.BINLOGS.rstrip("/"),
        },
    )


def _batch_word(text: str) -> str:
    """``text`` as one word of sftp's own commands."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_HEAD = """\
## Where the files are

The steps below want the repository as a folder of this machine, `REPOSITORY`.@beside@
From elsewhere, what is needed is fetched: at most @size@, and the binary logs, if they are wanted. Set `REPOSITORY` to
an empty or missing folder with that room (`export REPOSITORY=/var/tmp/repository`), and take **one** of the places: any
that has the backup is enough. Blocks of one place follow each other in one shell (type `sh`); what was interrupted may
be repeated, also in a new shell, from the first block on.

"""

_OBJECT = "[0-9a-f]{64}-[0-9a-f]{16}"

_NAMES = f"""\
for backup in @chain@; do
    grep -oE '{_OBJECT}' "@servers@@server@/$backup/manifest.json"
done | LC_ALL=C sort -u > objects.txt
"""
"""A manifest is clear text, and nothing else in it looks like an object's name."""

_CHECK = """\
while read -r object; do
    test -e "objects/$(printf %.2s "$object")/$object" || { echo "$object has not come" >&2; exit 1; }
done < objects.txt
"""

_S3_HEAD = """\
### From @name@ (S3)

@where@. You need the program `aws` and credentials for it, as `aws configure` or the variables `AWS_ACCESS_KEY_ID` and
`AWS_SECRET_ACCESS_KEY` give them, with the rights @rights@.@notes@
Where files are missing that somebody deleted or overwrote, and the bucket keeps versions, bring them back first:
`backupd bring-back @name@ --since TIME`, or by hand as `RECOVER.md` of this place tells.
"""

_S3_LISTS = f"""\
```shell
set -eu
: "${{REPOSITORY:?an empty or missing folder with room for the files}}"
case $REPOSITORY in /*) ;; *) echo 'REPOSITORY must begin with a slash' >&2; exit 1 ;; esac
mkdir -p "$REPOSITORY"
@settings@FROM=@from@
cd "$REPOSITORY"
for backup in @chain@; do
    aws@endpoint@ s3 cp --recursive --only-show-errors \\
        "$FROM/@servers@@server@/$backup/" "@servers@@server@/$backup/"
done
{_NAMES}sed 's|^\\(..\\)|objects/\\1/\\1|' objects.txt > objects-keys.txt
```
"""

_THAW = """\
@what@ lie in the archive class `@class@`. They have to be thawed before they can be read, which costs money.
The tiers take about so long: @hours@.
Ask for all of them, with `TIER` set to another one where you want that:

```shell
: "${TIER:=Standard}"
: "${DAYS:=7}"
export TIER DAYS
cat > thaw.sh << 'END_OF_SCRIPT'
said=$(aws@endpoint@ s3api restore-object --bucket @bucket_word@ --key @prefix_word@"$1" --restore-request \\
    "{\\"Days\\":$DAYS,\\"GlacierJobParameters\\":{\\"Tier\\":\\"$TIER\\"}}" 2>&1) && exit 0
case $said in
    *RestoreAlreadyInProgress*) ;;
    *'current storage class'*) ;; # it is not in an archive class
    *) echo "$1: $said" >&2; exit 1 ;;
esac
END_OF_SCRIPT
xargs -P 8 -n 1 sh thaw.sh < @keys@
```

This says how many cannot be read yet. Repeat it now and then, until it says 0:

```shell
cat > frozen.sh << 'END_OF_SCRIPT'
found=$(aws@endpoint@ s3api head-object --bucket @bucket_word@ --key @prefix_word@"$1" --output text \\
    --query '[StorageClass,Restore]') || exit 1
case $found in
    *'ongoing-request="false"'*) ;;
    *GLACIER* | *DEEP_ARCHIVE*) echo "$1" ;;
esac
END_OF_SCRIPT
xargs -P 8 -n 1 sh frozen.sh < @keys@ > frozen.txt
wc -l < frozen.txt
```

Then:
"""

_S3_FETCH = f"""\
```shell
: "${{SMALL:=5000}}"
cat > fetch.sh << 'END_OF_SCRIPT'
folder=$1
shift
for object in "$@"; do
    shift
    test -e "objects/$(printf %.2s "$object")/$object" || set -- "$@" --include "*$object"
done
test $# -eq 0 || aws@endpoint@ s3 cp --recursive --only-show-errors@force@ --exclude '*' "$@" \\
    @from@/objects/"$folder" objects/"$folder"
END_OF_SCRIPT
found=$(aws@endpoint@ s3api list-objects-v2 --bucket @bucket_word@ --prefix @prefix_word@objects/ --output json \\
    --max-items "$SMALL" --query 'length(Contents)')
if test "$found" -lt "$SMALL"; then
    xargs -P 4 -n 200 sh fetch.sh '' < objects.txt
else
    cut -c1-2 objects.txt | uniq | xargs -P 4 -I {{}} sh -c 'sh fetch.sh {{}}/ $(grep "^{{}}" objects.txt)'
fi
{_CHECK}```
"""
"""Where there are many objects, each ``aws`` fetches from one folder, since it lists all that it chooses from; where
there are few, starting it 256 times would take longer."""

_S3_LOGS_HEAD = """\
The binary logs, where a later moment than the backup's is wanted:
"""

_S3_LOG_KEYS = """\
```shell
aws@endpoint@ s3api list-objects-v2 --bucket @bucket_word@ --prefix @prefix_word@@logs@ --output text \\
    --query 'Contents[].[Key]' | grep -oE '@logs@.*/part-[^/]*$' > log-keys.txt
```
"""

_S3_LOGS = """\
```shell
aws@endpoint@ s3 cp --recursive --only-show-errors@force@ "$FROM/@logs@" "@logs@"
```
"""

_SFTP = f"""\
### From @name@ (SFTP)

Folder `@path@` of `@user@` on host `@host@`, port @port@. You need the program `sftp` and a private key that may log in
there. The host has to be in your file of known hosts; `SSH_OPTIONS` may hold options for `sftp`, such as
`-o UserKnownHostsFile=...`.

```shell
set -eu
: "${{REPOSITORY:?an empty or missing folder with room for the files}}"
: "${{SSH_KEY:?the file of the private key}}"
: "${{SSH_OPTIONS:=}}"
case $REPOSITORY in /*) ;; *) echo 'REPOSITORY must begin with a slash' >&2; exit 1 ;; esac
mkdir -p "$REPOSITORY"
cd "$REPOSITORY"
mkdir -p @servers@@server@
sftp -q -b - -P @port@ -i "$SSH_KEY" $SSH_OPTIONS @account@ << 'END_OF_BATCH' > /dev/null
@enter@
@gets@END_OF_BATCH
{_NAMES}{{
    printf '%s\\n' @enter_word@
    while read -r object; do
        file=objects/$(printf %.2s "$object")/$object
        mkdir -p "${{file%/*}}"
        test -e "$file" || printf 'get %s %s.part\\n!mv %s.part %s\\n' "$file" "$file" "$file" "$file"
    done < objects.txt
}} > batch.txt
sftp -q -b batch.txt -P @port@ -i "$SSH_KEY" $SSH_OPTIONS @account@ > /dev/null
{_CHECK}```

The binary logs, where a later moment than the backup's is wanted:

```shell
mkdir -p @binlogs@
sftp -q -b - -P @port@ -i "$SSH_KEY" $SSH_OPTIONS @account@ << 'END_OF_BATCH' > /dev/null
@enter@
get -r @logs@ @binlogs@
END_OF_BATCH
```
"""
