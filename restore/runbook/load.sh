#!/bin/sh
# Written by backupd; @readme@ explains it. Call: sh @script@ [options of the client]
client=${CLIENT:-@client@}
settings="SET SESSION sql_mode = 'NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION,ALLOW_INVALID_DATES', \
time_zone = '+00:00', foreign_key_checks = 0 /*M!101100 , system_versioning_insert_history = 1 */"

load() {
    file=$1 schema=$2
    shift 2
    printf '%s\n' "$file"
    set -- "$@" --batch --binary-mode --comments --skip-force --skip-reconnect --default-character-set=utf8mb4 \
        --max-allowed-packet=1G "--init-command=$settings"
    if [ -n "$schema" ]; then set -- "$@" -- "$schema"; fi
    # shellcheck disable=SC2086  # it may have options
    $client "$@" < "$file" || stop "stopped at $file: nothing behind it was loaded"
}

stop() {
    printf '%s: %s\n' @script@ "$1" >&2
    exit 1
}

unset CDPATH
case $0 in */*) cd -- "${0%/*}/" || stop "cannot go to the folder of this script" ;; esac
