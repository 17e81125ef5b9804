#!/bin/sh
# Makes the files of backup @backup@ from its sealed objects.
#
#     sh unpack.sh REPOSITORY FOLDER
#
# REPOSITORY holds objects/ and is only read. FOLDER must be empty or missing; it gets every file of the
# backup, as it was copied from the server, not yet prepared. Needs gpg with the private key, zstd, tar and
# sha256sum.
set -eu
umask 077
LC_ALL=C
export LC_ALL

fail() {
    echo "unpack.sh: $*" >&2
    exit 1
}

[ $# -eq 2 ] || fail 'usage: sh unpack.sh REPOSITORY FOLDER'
case $1 in /*) repository=$1 ;; *) repository=$PWD/$1 ;; esac
[ -d "$repository/objects" ] || fail "$repository holds no objects"
mkdir -p -- "$2"
cd -- "$2"
[ -z "$(ls -A)" ] || fail "$2 is not empty"
work=.unpacking
mkdir "$work"

# o OBJECT: open an object, still compressed, into $work/zst; behind its name stands the rest of the SHA-256 with which
# it was stored. It is copied first, so that what is opened is what was looked at.
o() {
    name=$(printf %.81s "$1")
    cp -- "$repository/objects/$(printf %.2s "$1")/$name" "$work/sealed" || fail "object $name is missing"
    printf '%s  %s
' "${1#*-}" "$work/sealed" | sha256sum -c --status ||
        fail "object $name is not what was stored: fetch it from another place"
    gpg --quiet --yes --output "$work/zst" --decrypt -- "$work/sealed" || fail "object $name cannot be opened"
}
# n FILE: a new file; p OBJECT...: append parts to it; h: let its empty blocks be holes again, where that is
# possible
n() {
    file=$1
    : > "./$file"
}
p() {
    for object do
        o "$object"
        zstd -q -d -c "$work/zst" >> "./$file" || fail "object $name cannot be unpacked"
    done
}
h() {
    if command -v fallocate > /dev/null; then fallocate --dig-holes "./$file" || :; fi
}
# b OBJECT: a bundle of small files
b() {
    o "$1"
    zstd -q -d -c "$work/zst" > "$work/tar" || fail "bundle $name cannot be unpacked"
    tar -xf "$work/tar" || fail "bundle $name is not a tar archive"
}

@lines@

sha256sum -c --quiet "$work/sums" || fail 'files differ from what was backed up'
rm -rf "$work"
echo '@files@ files, @size@ bytes: all exactly as backed up'
