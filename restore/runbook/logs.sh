# --- choose
: "${TO:=}"
: "${HISTORY:=}"
LOGS="$REPOSITORY/@logs@" SAID=$WORK/logs/said
STARTED=@started@ FINISHED=@finished@
UUID=@uuid@
GTID=@gtid@
FILE=@file@
POS=@pos@

refuse() { printf '%s\n' "$@" >&2; exit 1; }
later() { LC_ALL=C expr "x$1" \> "x$2" > /dev/null; }
number() { set -- "${1#"${1%%[!0]*}"}"; echo "${1:-0}"; }
# moment TIME: with all digits, so that times compare as text
moment() {
    set -- "${1%Z}"
    case $1 in *.*) set -- "${1%%.*}" "${1#*.}" ;; *) set -- "$1" "" ;; esac
    printf '%s.%-6.6s\n' "$1" "$2" | tr ' ' 0
}
# field NAME FILE: a word or a number of a clear description
field() {
    LC_ALL=C sed -n -e 's/.*[{,]"'"$1"'":"\([^"]*\)".*/\1/p' -e 's/.*[{,]"'"$1"'":\([0-9][0-9]*\).*/\1/p' "$2"
}
# taken FILE AS: a clear description, as it is from now on
taken() {
    mkdir -p "${2%/*}"
    cp "$1" "$2"@look@
}
goes_on() { grep -q '"names_go_on":true' "$SAID/$1/branch.json" 2> /dev/null; }
told() {
    while read -r noticed id; do
        since=$(field since "$SAID/$id/branch.json")
        echo "$id: $(field reason "$SAID/$id/branch.json"), noticed at $noticed${since:+, after $since}"
    done < "$WORK/logs/histories"
}
uncertain() { refuse "$1" "set HISTORY to one of these, or take another backup:" "$(told)"; }
list_histories() {
    for file in "$LOGS"/*/branch.json; do
        test -e "$file" || break
        id=$(basename "${file%/*}")
        taken "$file" "$SAID/$id/branch.json"
        test "$(field id "$SAID/$id/branch.json") $(field server "$SAID/$id/branch.json")" = "$id $SERVER" ||
            refuse "STOP: $file is that of another history"
        echo "$(moment "$(field noticed_at "$SAID/$id/branch.json")") $id"
    done > "$WORK/logs/histories"
    LC_ALL=C sort -o "$WORK/logs/histories" "$WORK/logs/histories"
}
# sets OF_BACKUP: the history that the backup was taken on
find_backup() {
    found=
    while read -r noticed id; do
        since=$(field since "$SAID/$id/branch.json")
        if test -z "$found" || ! later "$noticed" "$STARTED"; then found=$id; continue; fi
        if test -n "$since" && ! later "$FINISHED" "$(moment "$since")"; then break; fi
        found="$found $id"
        if later "$noticed" "$FINISHED"; then break; fi
    done < "$WORK/logs/histories"
    OF_BACKUP=
    for id in $found; do
        uuid=$(field server_uuid "$SAID/$id/branch.json")
        if test -n "$uuid" && test -n "$UUID" && test "$uuid" != "$UUID"; then continue; fi
        test -z "$OF_BACKUP" || uncertain "it is not certain which history of the server the backup is of"
        OF_BACKUP=$id
    done
    test -n "$OF_BACKUP" || uncertain "the backup is of none of the histories that are archived"
}
# sets HISTORY: the one that the server was on at the moment
find_history() {
    doubtful=
    while read -r noticed id; do
        since=$(field since "$SAID/$id/branch.json")
        if test "$TO" = latest || test -z "$HISTORY" || ! later "$noticed" "$UNTIL"; then
            HISTORY=$id doubtful=
        elif test -n "$since" && later "$UNTIL" "$(moment "$since")"; then
            doubtful=$id
        fi
    done < "$WORK/logs/histories"
    test -z "$doubtful" || uncertain "it is not certain which history the server was on at $TO"
    id=$HISTORY
    while test "$id" != "$OF_BACKUP" && goes_on "$id"; do id=$(field parent "$SAID/$id/branch.json"); done
    test "$id" = "$OF_BACKUP" ||
        refuse "at $TO the server was on history $HISTORY, and this backup is of $OF_BACKUP:" \
            "take the runbook of a backup that was made on $HISTORY" "$(told)"
    of_file "$FILE"
    { test "$id" = "$OF_BACKUP" && test "$POS" -le "${limit:-$POS}"; } || refuse "history $HISTORY left that of the" \
        "backup before the backup's place: it holds what the server had lost by $TO. Take the runbook of an earlier one"
}
# of_file NUMBER: sets id, the history whose file of that number counts, limit, where that is left, and the GTIDs shared
of_file() {
    # shellcheck disable=SC1007 # two variables are made empty
    id=$HISTORY limit= shared=
    while test "$1" -lt "$(field first_number "$SAID/$id/branch.json")" && goes_on "$id"; do
        left=$(field file "$SAID/$id/branch.json")
        left=$(number "${left##*.}") pos=
        if test "$left" = "$1"; then pos=$(field pos "$SAID/$id/branch.json"); fi
        if test "$left" -lt "$1"; then pos=0; fi
        if test -n "$pos" && { test -z "$limit" || test "$pos" -lt "$limit"; }; then
            limit=$pos shared=$(field gtid "$SAID/$id/branch.json")
        fi
        id=$(field parent "$SAID/$id/branch.json")
    done
}
# opened FOLDER NAME: the plain bytes of a sealed part of $piece, in $WORK/logs/part
opened() {
    rm -f "$WORK/logs/part" "$WORK/logs/part.zst"
    cp "$1/$2" "$WORK/logs/part.gpg" || refuse "$1/$2 is missing"
    stored=$(sed -n 's/.*\["'"$2"'",[0-9]*,"\([0-9a-f]*\)",.*/\1/p' "$piece/segment.json")
    test "$(sha256sum < "$WORK/logs/part.gpg" | cut -c 1-64)" = "$stored" ||
        refuse "$1/$2 is not what was archived: fetch it from another place"
    # shellcheck disable=SC2015 # refused where either fails
    gpg --quiet --output "$WORK/logs/part.zst" --decrypt "$WORK/logs/part.gpg" &&
        zstd -q -d "$WORK/logs/part.zst" -o "$WORK/logs/part" || refuse "$1/$2 cannot be opened"
}
# pieces NUMBER: folders that are the file together, in order, and from which byte on each counts
pieces() {
    printf '%s\n' "$LOGS/$id/$(printf %010d "$1")"-*/segment.json | LC_ALL=C sort | LC_ALL=C awk -F / '
        { folder = $(NF - 1); split(folder, range, "-"); start = range[2] + 0; end = range[3] + 0 }
        folder ~ /[*]/ { exit }
        start > at && best_end > at { print best, at + 0; at = best_end }
        start > at { print "gap", start; exit }
        end > best_end { best = folder; best_end = end }
        END { if (best_end > at) print best, at + 0 }'
}
# bring NUMBER: the file as $WORK/logs/NUMBER, and as far as they are needed its transactions as $WORK/logs/index
# (of all files where TO is a time: a session can set its own, so no time of a whole file tells what is in it)
bring() {
    of_file "$1"
    pieces "$1" > "$WORK/logs/pieces"
    : > "$WORK/logs/$1"
    : > "$WORK/logs/index"
    # shellcheck disable=SC1007 # two variables are made empty
    size=0 first= gap=
    while read -r folder at <&3; do
        if test "$folder" = gap; then gap=$at; break; fi
        piece=$SAID/$id/$folder
        taken "$LOGS/$id/$folder/segment.json" "$piece/segment.json"
        whose=$(field server "$piece/segment.json")/$(field branch "$piece/segment.json")/$(printf %010d-%012d-%012d \
            "$(field number "$piece/segment.json")" "$(field start "$piece/segment.json")" \
            "$(field end "$piece/segment.json")")
        test "$whose" = "$SERVER/$id/$folder" ||
            refuse "STOP: $LOGS/$id/$folder/segment.json is that of other logs: $whose"
        : "${first:=$piece}"
        : > "$WORK/logs/piece"
        # shellcheck disable=SC2013 # names without spaces
        for part in $(grep -oE 'part-[0-9]+([.]piece)?[.]zst[.]gpg' "$piece/segment.json"); do
            opened "$LOGS/$id/$folder" "$part"
            cat "$WORK/logs/part" >> "$WORK/logs/piece"
        done
        skipped=${folder#*-}
        tail -c "+$((at - $(number "${skipped%-*}") + 1))" "$WORK/logs/piece" >> "$WORK/logs/$1"
        if test "$1" = "$FILE" || test -n "$UNTIL"; then
            # shellcheck disable=SC2013 # names without spaces
            for part in $(grep -oE 'index-[0-9]+[.]zst[.]gpg' "$piece/segment.json"); do
                opened "$LOGS/$id/$folder" "$part"
                LC_ALL=C sed -n \
                    's/^{"gtid":"\([^"]*\)","start":\([0-9]*\),"end":\([0-9]*\),"at":"\([^"]*\)Z".*/\2 \3 \4 \1/p' \
                    "$WORK/logs/part" | LC_ALL=C awk -v at="$at" '
                    $1 >= at { if ($3 !~ /[.]/) $3 = $3 ".000000"; print }' >> "$WORK/logs/index"
            done
        fi
        size=$(number "${folder##*-}")
    done 3< "$WORK/logs/pieces"
    if test -n "$limit" && test "$size" -gt "$limit"; then
        head -c "$limit" "$WORK/logs/$1" > "$WORK/logs/part"
        mv "$WORK/logs/part" "$WORK/logs/$1"
        size=$limit
    fi
}
# is the place of the backup one between two transactions of these logs, and was what is before it executed?
compare_place() {
    test "$size" -ge "$POS" || refuse "binary log $FILE of history $id is archived up to byte $size only, and the" \
        "backup stands at $POS"
    LC_ALL=C awk -v pos="$POS" -v had="$GTID" '
        $1 < pos && $2 > pos { wrong = 1 }
        $2 <= pos { gtid = $4 }
        END {
            if (gtid != "" && had != "") {
                held = 0
                if (split(gtid, one, "-") == 3 && gtid !~ /:/) {
                    for (n = split(had, all, ","); n; n--) {
                        split(all[n], other, "-")
                        if (other[1] == one[1] && other[3] + 0 >= one[3] + 0) held = 1
                    }
                } else if (split(gtid, one, ":") == 2) {
                    for (n = split(had, all, ","); n; n--) {
                        m = split(all[n], other, ":")
                        for (; m > 1 && other[1] == one[1]; m--) {
                            k = split(other[m], range, "-")
                            if (one[2] + 0 >= range[1] + 0 && one[2] + 0 <= range[k] + 0) held = 1
                        }
                    }
                } else held = 1
                if (!held) wrong = 1
            }
            exit wrong
        }' "$WORK/logs/index" || uncertain "the backup is not of history $id: its place is none there"
}
# find_end NUMBER: sets HELD, file and byte where what is later than UNTIL begins, and whether that is certain. What the
# order of the log contradicts is not believed: a time that is still to come, or an hour before one in front of it, or
# one behind which ten times as many go on from before it. Such a transaction right at the end is left out.
find_end() {
    LC_ALL=C awk -v count="$1" -v from="$from" -v limit="${limit:-0}" -v until="x$UNTIL" -v now="x$NOW" \
        -v state="$STATE" -v started="$STARTED" '
        function seconds(text, part, y, m) {
            split(text, part, /[-T:]/)
            y = part[1] + 0; m = part[2] + 0
            if (m < 3) { y--; m += 12 }
            return (365 * y + int(y / 4) - int(y / 100) + int(y / 400) + int((153 * m - 457) / 5) + part[3]) * 86400 \
                + part[4] * 3600 + part[5] * 60 + part[6]
        }
        BEGIN {
            if (split(state, old, " ")) { reached = old[1]; low = old[2]; jumped = old[3]; behind = old[4] }
            if (old[6] != "") held = old[5] " " old[6]
            floor = seconds(started) - 86400
        }
        limit && $1 >= limit { exit }
        {
            at = "x" $3; s = seconds($3)
            if (reached && floor < reached - 3600) floor = reached - 3600
            if ($1 < from) { if (s >= floor && at <= until && s > reached) reached = s; next }
            # a time far ahead of what was in front of it is false where as many go on from there
            if (!later && low && s >= low && s < floor && ++behind >= jumped) {
                reached = s; floor = s - 3600; low = 0; held = ""
            }
            if (at > now || s < floor) { if (held == "") held = count " " $1; next }
            if (at > until) {
                if (held == "") held = count " " $1
                if (!later++ || s < least) least = s
                next
            }
            if (!later || (s >= reached && least - s > 600 && ++against >= 10 * later)) {
                if (!later && reached && s > reached + 3600) { low = reached; jumped = behind = 0 }
                jumped++
                held = ""; later = against = 0
                if (s > reached) reached = s
            }
        }
        END { printf "%.6f %.6f %d %d %s\n%s\n", reached, low, jumped, behind, held, later ? "certain" : "" }
    ' "$WORK/logs/index" > "$WORK/logs/end"
    { read -r STATE && { read -r CERTAIN || :; } } < "$WORK/logs/end"
    HELD=$(echo "$STATE" | cut -s -d ' ' -f 5-)
}
sorted() { echo "$1" | tr , '\n' | LC_ALL=C sort; }
# follows NUMBER: does the file that was just brought go on from the one before it?
follows() {
    test -n "$before" || return 0
    executed=$(field gtids_before "$first/segment.json")
    ending=$(field ending "$before/segment.json") reached=$(field gtids_after "$before/segment.json")
    # up to a fork all of its bytes are here: only GTIDs that are known can tell otherwise
    if test -n "$crossed"; then ending=rotated reached=${forked:-$executed} executed=${executed:-$forked}; fi
    # shellcheck disable=SC2015 # refused where either fails
    test "$ending" != open && { test "$ending" != cut || test -n "$executed"; } &&
        test "$(sorted "$executed")" = "$(sorted "$reached")" || refuse \
        "gap: between binary logs $(($1 - 1)) and $1 of history $id something is missing." \
        "TO has to be before the end of $(($1 - 1)), or take the runbook of a later backup"
}

REPLAY='' BEGIN=4 END='' HELD='' STATE='' CERTAIN='' NOW=$(date -u +%Y-%m-%dT%H:%M:%S)
if test -n "$TO"; then
    case $TO in
        latest) UNTIL= ;;
        [0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9]Z | \
        [0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9]:[0-9][0-9]:[0-9][0-9].*[0-9]Z) UNTIL=$(moment "$TO") ;;
        *) refuse "TO is $TO: set it to latest, or to a time such as 2026-11-21T09:41:03Z" ;;
    esac
    if test -n "$UNTIL" && later "$FINISHED" "$UNTIL"; then
        refuse "the backup ended at ${FINISHED}Z, after $TO: take the runbook of an earlier one"
    fi
    command -v @reader@ > /dev/null || refuse "@reader@ is missing"
    # shellcheck disable=SC2174 # WORK is there
    mkdir -p -m 0700 "$WORK/logs"
    list_histories
fi
if test -n "$TO" && ! test -s "$WORK/logs/histories"; then
    test "$TO" = latest || refuse "there are no binary logs in $LOGS"
    echo "no binary logs are in $LOGS: the moment of the backup comes back" >&2
elif test -n "$TO"; then
    if test -n "$HISTORY"; then
        test -e "$SAID/$HISTORY/branch.json" || uncertain "there is no history $HISTORY"
    else
        find_backup
        find_history
    fi
    count=$FILE before=
    while :; do
        bring "$count"
        if test "$size" = 0; then
            test "$count" != "$FILE" || refuse "binary log $FILE of history $id is not archived from its beginning"
            rm "$WORK/logs/$count"
            test "$id" = "$HISTORY" ||
                refuse "gap: binary log $count of history $id is missing or incomplete, and history $HISTORY goes on" \
                    "behind it. TO has to be before its beginning, or take the runbook of a later backup"
            for file in "$LOGS/$id"/*/segment.json; do
                test -e "$file" || break
                file=$(basename "${file%/*}")
                test "$(number "${file%%-*}")" -lt "$count" ||
                    refuse "gap: binary log $count of history $id is missing or incomplete, and there are later ones." \
                        "TO has to be before its beginning, or take the runbook of a later backup"
            done
            break
        fi
        follows "$count"
        from=0
        if test "$count" = "$FILE"; then
            compare_place
            from=$POS
        fi
        if test -n "$UNTIL"; then find_end "$count"; fi
        if test "$size" -gt "$from"; then
            test -n "$REPLAY" || BEGIN=$((from > 4 ? from : 4))
            REPLAY="$REPLAY $count"
        fi
        test -z "$CERTAIN" || break
        test -z "$gap" || refuse "gap: bytes $size to $gap of binary log $count of history $id are missing." \
            "TO has to be before them, or take the runbook of a later backup"
        test "$size" -ge "${limit:-0}" ||
            refuse "gap: bytes $size to $limit of binary log $count of history $id are missing, and history $HISTORY" \
                "goes on behind them. TO has to be before them, or take the runbook of a later backup"
        before=$piece crossed=$limit forked=$shared
        count=$((count + 1))
    done
    rm -f "$WORK/logs/part" "$WORK/logs/part.zst" "$WORK/logs/part.gpg" "$WORK/logs/piece" "$WORK/logs/end"
    if test -n "$HELD"; then
        END=${HELD#* } whole=$REPLAY REPLAY=
        for count in $whole; do
            if test "$count" = "$FILE"; then from=$POS; else from=0; fi
            if test "$count" -lt "${HELD% *}" || { test "$count" = "${HELD% *}" && test "$END" -gt "$from"; }; then
                REPLAY="$REPLAY $count"
            fi
        done
        test -n "$REPLAY" || BEGIN=4
        echo "history $HISTORY, up to byte $END of binary log ${HELD% *}: the first transaction there is later than" \
            "$TO, or its time cannot be believed"
    else
        echo "history $HISTORY, up to the end of what is archived of it, in binary log $((count - 1))"
        test "$TO" = latest || echo "WHAT IS ARCHIVED ENDS BEFORE $TO: look whether that is all" >&2
    fi
fi

# --- look
    if test -e "$1.sig"; then cp "$1.sig" "$2.sig"; fi
    signed_by_signer "$2" "$1"

# --- apply
if test -n "$REPLAY"; then
: "${ZONE=@zone@}"
mkdir -p "$WORK/run" "$WORK/logs/load"
password=$(od -An -N 16 -tx1 /dev/urandom | tr -d ' \n')-Aa1
cat > "$WORK/run/init.sql" << END_OF_STATEMENTS
DROP USER IF EXISTS @account@@localhost;
CREATE USER @account@@localhost IDENTIFIED BY '$password';
GRANT ALL PRIVILEGES ON *.* TO @account@@localhost WITH GRANT OPTION;
END_OF_STATEMENTS
printf '[client]\nuser=@account@\npassword=%s\n' "$password" > "$WORK/run/client.cnf"
chown -R "$OWNER:" "$WORK/data" "$WORK/logs"
@options@
@begun@
rm "$WORK/run/init.sql"
@client@ -e 'SET GLOBAL local_infile = ON'
set --
for count in $REPLAY; do set -- "$@" "$WORK/logs/$count"; done
# shellcheck disable=SC2154 # server: of begun
{
    {
@session@
        runuser -u "$OWNER" -- @reader@ --verify-binlog-checksum --local-load="$WORK/logs/load"@reading@ \
            --start-position="$BEGIN" ${END:+--stop-position="$END"} "$@" || : > "$WORK/unread"
    } | runuser -u "$OWNER" -- @client@ --binary-mode --max-allowed-packet=1G --local-infile=1
} || { kill "$server"; echo 'the logs were not applied: remove WORK and begin again' >&2; exit 1; }
test ! -e "$WORK/unread" ||
    { kill "$server"; echo 'the logs cannot be read to their end: remove WORK and begin again' >&2; exit 1; }
@client@ -e 'DROP USER @account@@localhost'
kill "$server"
wait "$server"
rm -r "$WORK/run"
fi
