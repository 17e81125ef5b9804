"""What ``RECOVER.md`` says of a bucket in which somebody deleted or overwrote files: they come back with ``aws``."""

from __future__ import annotations

import json
from shlex import quote
from urllib.parse import quote as in_url

from storage.contract import layout
from storage.contract.config import S3Config

_PASSING = (layout.INTENTS, layout.PINS, layout.SWEEPS, layout.TOMBSTONES, layout.QUARANTINE, layout.MARKS)
_ONCE = (layout.OBJECTS, layout.SERVERS)
"""Here nothing is ever written twice, so what was put over it is somebody else's."""


def bring_back_text(config: S3Config, name: str) -> str:
    """Markdown, with a block of shell that does something only where ``SINCE`` is set. It begins where ``BASE`` and
    ``problem`` are there. ``name``: what the destination is called."""
    prefix = f"{config.prefix}/" if config.prefix else ""
    options = "".join(
        f" {option} {quote(value)}"
        for option, value in (("--endpoint-url", config.endpoint_url), ("--region", config.region))
        if value
    )
    text = _TEXT
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


_TEXT = r"""
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
