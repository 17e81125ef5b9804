"""Where everything is at a destination: the only module that knows how keys are spelt.

    repository.json                                 marker and identity of the repository
    objects/<2 hex>/<object>                        sealed parts and bundles, immutable
    servers/<server>/<id>/manifest.json             the commit point of a backup
    servers/<server>/<id>/body.jsonl.zst.gpg        sealed body of the manifest
    servers/<server>/<id>/unpack.sh.zst.gpg         sealed script that puts the parts together
    servers/<server>/<id>/config.tar.zst.gpg        sealed configuration of the source's host
    servers/<server>/<id>/RUNBOOK.md                how to restore by hand
    servers/<server>/<id>/files/...                 browsable tree of links (TREE destinations)
    servers/<server>/<id>.partial/...               the same tree while the backup runs
    intents/<id>.json  pins/<id>.json               who writes, who reads
    sweeps/<id>.json                                who removes
    tombstones/<object>.json                        about to be collected
    quarantine/<object>.json                        found damaged, never reused
    marks/<server>/<id>.json                        backup marked deleted
    held/<server>/<id>.json                         backup kept on purpose
    held/<server>/server.json                       nothing of this server is deleted
    held/all/servers.json                           nothing at all is deleted
    binlogs/<server>/<branch>/branch.json           what one history of a server is
    binlogs/<server>/<branch>/<segment>/segment.json             the commit point of a binary log, or of a piece of one
    binlogs/<server>/<branch>/<segment>/part-<n>.zst.gpg         its bytes, sealed; of a piece: part-<n>.piece.zst.gpg
    binlogs/<server>/<branch>/<segment>/index-<n>.zst.gpg        its transactions, sealed
    <manifest.json, segment.json, branch.json>.sig  a detached signature of the document, put before it
    <proofs, catalog, configuration/...>.sig        the same
    heads/<server>/head.json                        how far a server's history had come, and when; signed
    proofs/<server>/<id>.zst.gpg                    a test restore's proof, or a witness, sealed
    catalog/<time>-<installation>-<catalog>.zst.gpg a copy of the catalog, sealed
    configuration/<time>-<installation>.tar.zst.gpg a copy of configuration and policies, sealed
    RECOVER.md                                      what to do when nothing but this is left, in the clear

An object is named ``<identity: 64 hex>-<first 16 hex of the SHA-256 of its stored bytes>``, so two different byte
strings never share a name. A segment's folder is called ``<file number, 10 digits>-<first byte, 12>-<byte after the
last, 12>``, so that a branch lists in log order.

Also: what the files of a backup are called in its browsable tree of links.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from backupd.model.backup_record import EVERY_SERVER
from backupd.model.binlog import SegmentKey
from backupd.model.errors import DamagedError, DestinationError, UsageError
from backupd.model.text import is_id, is_name

if TYPE_CHECKING:
    from backupd.model.manifest import Entry

REPOSITORY = "repository.json"
OBJECTS = "objects/"
SERVERS = "servers/"
INTENTS = "intents/"
PINS = "pins/"
SWEEPS = "sweeps/"
TOMBSTONES = "tombstones/"
QUARANTINE = "quarantine/"
MARKS = "marks/"
HELD = "held/"
BINLOGS = "binlogs/"
HEADS = "heads/"
PROOFS = "proofs/"
CATALOGS = "catalog/"
CONFIGURATIONS = "configuration/"
RECOVER = "RECOVER.md"

MANIFEST = "manifest.json"
BODY = "body.jsonl.zst.gpg"
UNPACK = "unpack.sh.zst.gpg"
CONFIG = "config.tar.zst.gpg"
RUNBOOK = "RUNBOOK.md"
FILES = "files"
PARTIAL = ".partial"
BRANCH = "branch.json"
SEGMENT = "segment.json"

SEALED = ".zst.gpg"
SIGNATURE = ".sig"

DEEPEST = 5
"""Parts of the longest key. What is deeper, outside of trees, is none of ours, and is not gone through."""

_OBJECT = re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}")
_HELD_ALL = HELD + "all/servers.json"
_HELD_SERVER = "server.json"
_HEAD = "head.json"
_SEGMENT = re.compile(r"(\d{10})-(\d{12})-(\d{12})")
_PIECE = ".piece"
_SEALED_LOG = re.compile(r"(?:part-\d{5,}(?:\.piece)?|index-\d{5,})\.zst\.gpg")
_COLD_LOG = re.compile(r"part-\d{5,}\.zst\.gpg")
_COPY = re.compile(r"(\d{8}T\d{6}Z)-([0-9a-f]{12}(?:-[0-9a-f]{12})?)(?:\.tar)?\.zst\.gpg")
_KEY_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PARTS = ".parts"
_BUNDLE = ".bundle-"
_NAME_MAX = 255
"""Bytes in one file name on every Linux file system that matters."""


# Objects


def object_name(identity: str, stored_sha256: str) -> str:
    """Name of the object with ``identity`` (64 hex) whose stored bytes have the digest ``stored_sha256`` (64 hex)."""
    return _object(f"{identity}-{stored_sha256[:16]}")


def is_object_name(name: str) -> bool:
    """Is ``name`` one that ``object_name`` gives?"""
    return _OBJECT.fullmatch(name) is not None


def identity_of(name: str) -> str:
    """The identity (64 hex) inside an object's name."""
    return _object(name)[:64]


def object_key(name: str) -> str:
    """Raises DamagedError for a name that we never give: such a name comes from an altered manifest."""
    return f"{OBJECTS}{_object(name)[:2]}/{name}"


def tombstone_key(name: str) -> str:
    """Of the note that the object is about to be collected. Raises DamagedError as ``object_key``."""
    return f"{TOMBSTONES}{_object(name)}.json"


def quarantine_key(name: str) -> str:
    """Of the note that the object was found damaged. Raises DamagedError as ``object_key``."""
    return f"{QUARANTINE}{_object(name)}.json"


def name_in(key: str) -> str:
    """Last part of ``key`` without ``.json``: the object or id that a mark is about."""
    return key.rsplit("/", 1)[-1].removesuffix(".json")


# Backups


def backup_folder(server: str, backup_id: str) -> str:
    """Key of a backup's folder, with a slash at its end. Raises UsageError for what is no name or no id."""
    return f"{SERVERS}{_server(server)}/{_id(backup_id)}/"


def manifest_key(server: str, backup_id: str) -> str:
    """Of the manifest, which makes a backup."""
    return backup_folder(server, backup_id) + MANIFEST


def body_key(server: str, backup_id: str) -> str:
    """Of the sealed body of the manifest."""
    return backup_folder(server, backup_id) + BODY


def unpack_key(server: str, backup_id: str) -> str:
    """Of the sealed script that puts the parts together."""
    return backup_folder(server, backup_id) + UNPACK


def config_key(server: str, backup_id: str) -> str:
    """Of the sealed configuration of the source's host."""
    return backup_folder(server, backup_id) + CONFIG


def runbook_key(server: str, backup_id: str) -> str:
    """Of the text that says how to restore by hand."""
    return backup_folder(server, backup_id) + RUNBOOK


def mark_key(server: str, backup_id: str) -> str:
    """Of the note that a backup is marked deleted."""
    return f"{MARKS}{_server(server)}/{_id(backup_id)}.json"


def keep_key(server: str, backup_id: str) -> str:
    """Of the note that one backup is kept on purpose."""
    return f"{HELD}{_server(server)}/{_id(backup_id)}.json"


def hold_key(server: str) -> str:
    """``server`` may be ``*``: every one."""
    return _HELD_ALL if server == EVERY_SERVER else f"{HELD}{_server(server)}/{_HELD_SERVER}"


def held_server(key: str) -> str | None:
    """The server (``*``: every one) whose hold is under ``key``, None for anything else."""
    if key == _HELD_ALL:
        return EVERY_SERVER
    parts = key.split("/")
    ours = len(parts) == 3 and parts[0] + "/" == HELD and parts[2] == _HELD_SERVER
    return parts[1] if ours and is_name(parts[1]) else None


def intent_key(backup_id: str) -> str:
    """Of the lease of a backup that is being written."""
    return f"{INTENTS}{_id(backup_id)}.json"


def pin_key(restore_id: str) -> str:
    """Of the lease of a restore that reads backups."""
    return f"{PINS}{_id(restore_id)}.json"


def sweep_key(sweep_id: str) -> str:
    """Of the lease of a process that removes."""
    return f"{SWEEPS}{_id(sweep_id)}.json"


def backup_of(key: str) -> tuple[str, str] | None:
    """(server, backup id) of a key or tree under ``servers/``, of a mark or a keep, None for anything else."""
    parts = key.split("/")
    if len(parts) < 3 or parts[0] + "/" not in {SERVERS, MARKS, HELD}:
        return None
    server, backup_id = parts[1], parts[2].removesuffix(".json")
    return (server, backup_id) if is_name(server) and is_id(backup_id) else None


# Binary logs


def binlogs_folder(server: str) -> str:
    """Below this key are all binary logs of a server; a slash is at its end."""
    return f"{BINLOGS}{_server(server)}/"


def branch_folder(server: str, branch: str) -> str:
    """Below this key are the segments of one branch; a slash is at its end."""
    return f"{binlogs_folder(server)}{_id(branch)}/"


def branch_key(server: str, branch: str) -> str:
    """Of the description of a branch."""
    return branch_folder(server, branch) + BRANCH


def file_prefix(server: str, branch: str, number: int) -> str:
    """What the keys of all segments of one file begin with."""
    return f"{branch_folder(server, branch)}{_digits(number, 10)}-"


def segment_folder(server: str, key: SegmentKey) -> str:
    """Key of a segment's folder, with a slash at its end. Raises UsageError for an empty range of bytes."""
    if not key.start < key.end:
        raise UsageError(f"bytes {key.start} to {key.end} are no part of a binary log")
    return f"{file_prefix(server, key.branch, key.number)}{_digits(key.start, 12)}-{_digits(key.end, 12)}/"


def segment_key(server: str, key: SegmentKey) -> str:
    """Of the description that makes a segment."""
    return segment_folder(server, key) + SEGMENT


def part_name(index: int, *, piece: bool = False) -> str:
    """Name inside a segment's folder. ``piece``: the segment is a piece of a file that still grows, and is replaced by
    a longer one soon."""
    return f"part-{index:05d}{_PIECE if piece else ''}{SEALED}"


def of_piece(name: str) -> bool:
    """Is ``name`` one that ``part_name`` gives for pieces?"""
    return name.endswith(_PIECE + SEALED)


def index_name(index: int) -> str:
    """Name inside a segment's folder."""
    return f"index-{index:05d}{SEALED}"


def is_sealed_log(name: str) -> bool:
    """Is ``name`` one that ``part_name`` or ``index_name`` gives?"""
    return _SEALED_LOG.fullmatch(name) is not None


def cold_kind(key: str) -> Literal["object", "log"] | None:
    """What of a destination may be in another storage class, even one that has to be thawed: ``object`` for sealed
    parts of files, ``log`` for sealed parts of whole binary logs. None for everything that lists what is stored, and
    for pieces, which are replaced soon."""
    if key.startswith(OBJECTS):
        return "object"
    owner = segment_of(key)
    return "log" if owner is not None and _COLD_LOG.fullmatch(owner[2]) else None


def comes_and_goes(key: str) -> bool:
    """Is ``key`` that of a lease, a mark, a note, or of a piece of a binary log that begins behind its file's
    beginning: nothing that a lock may keep from being taken away? A piece that begins with its file may become the
    whole of it."""
    owner = segment_of(key)
    if owner is not None:
        return owner[1].start > 0
    return key.partition("/")[0] + "/" in {INTENTS, PINS, SWEEPS, TOMBSTONES, QUARANTINE, MARKS, HELD}


def segment_of(key: str) -> tuple[str, SegmentKey, str] | None:
    """(server, segment, name in its folder) of a key below a segment, None for anything else."""
    parts = key.split("/")
    if len(parts) != 5 or parts[0] + "/" != BINLOGS or not is_name(parts[1]) or not is_id(parts[2]):
        return None
    found = _SEGMENT.fullmatch(parts[3])
    if found is None or int(found[2]) >= int(found[3]):
        return None
    return parts[1], SegmentKey(parts[2], int(found[1]), int(found[2]), int(found[3])), parts[4]


def branch_of(key: str) -> tuple[str, str] | None:
    """(server, branch) whose description is under ``key``, None for anything else."""
    parts = key.split("/")
    if len(parts) != 4 or parts[0] + "/" != BINLOGS or parts[3] != BRANCH:
        return None
    return (parts[1], parts[2]) if is_name(parts[1]) and is_id(parts[2]) else None


# Signatures


def head_key(server: str) -> str:
    """Where a server's head is."""
    return f"{HEADS}{server}/{_HEAD}"


def signature_key(key: str) -> str:
    """Where the signature of the document under ``key`` is."""
    return key + SIGNATURE


def signed_of(key: str) -> str | None:
    """The server that the document of record under ``key`` is about: a manifest, a segment's or a branch's description,
    a head, a proof or a witness; ``*`` for a copy of a catalog or of a configuration, which is about all of them; None
    for anything else. These are signed, and with their digests everything else is."""
    if copy_of(key) is not None:
        return EVERY_SERVER
    proof = proof_of(key)
    if proof is not None:
        return proof[0]
    parts = key.split("/")
    ours = (
        (len(parts) == 4 and (parts[0] + "/", parts[3]) in {(SERVERS, MANIFEST), (BINLOGS, BRANCH)})
        or (len(parts) == 5 and (parts[0] + "/", parts[4]) == (BINLOGS, SEGMENT))
        or (len(parts) == 3 and (parts[0] + "/", parts[2]) == (HEADS, _HEAD))
    )
    return parts[1] if ours and is_name(parts[1]) else None


def is_copy(key: str) -> bool:
    """Does ``key`` hold a copy of what is known elsewhere: a proof, a witness, a catalog, a configuration?"""
    return copy_of(key) is not None or proof_of(key) is not None


# What outlives a lost catalog


def proof_key(server: str, proof_id: str) -> str:
    """Of a proof or a witness."""
    return f"{PROOFS}{_server(server)}/{_id(proof_id)}{SEALED}"


def proof_of(key: str) -> tuple[str, str] | None:
    """(server, id) of a proof or witness under ``key``, None for anything else."""
    parts = key.split("/")
    if len(parts) != 3 or parts[0] + "/" != PROOFS or not parts[2].endswith(SEALED):
        return None
    server, proof_id = parts[1], parts[2].removesuffix(SEALED)
    return (server, proof_id) if is_name(server) and is_id(proof_id) else None


def catalog_key(at: datetime, maker: str) -> str:
    """``maker``: installation and catalog, each 12 hex digits, with a hyphen between them."""
    return f"{CATALOGS}{at:%Y%m%dT%H%M%SZ}-{maker}{SEALED}"


def configuration_key(at: datetime, installation: str) -> str:
    """Of a copy of configuration and policies that was made at ``at`` (UTC). ``installation``: 12 hex digits."""
    return f"{CONFIGURATIONS}{at:%Y%m%dT%H%M%SZ}-{installation}.tar{SEALED}"


def copy_of(key: str) -> tuple[datetime, str] | None:
    """When (UTC) the copy of a catalog or a configuration under ``key`` was made, and by whom: the installation, and of
    a catalog which one; None for anything else."""
    folder, _, name = key.rpartition("/")
    found = _COPY.fullmatch(name) if folder + "/" in {CATALOGS, CONFIGURATIONS} else None
    if found is None:
        return None
    try:
        return datetime.strptime(found[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC), found[2]
    except ValueError:
        return None


# Trees


def tree_name(server: str, backup_id: str) -> str:
    """What link, publish and remove_tree of a destination call the tree of a backup."""
    return backup_folder(server, backup_id).rstrip("/")


def in_tree(key: str) -> bool:
    """Is ``key`` where trees are, so that it can never be an object's key?"""
    parts = key.split("/")
    if len(parts) < 3 or parts[0] + "/" != SERVERS:
        return False
    return parts[2].endswith(PARTIAL) or (len(parts) > 3 and parts[3] == FILES)


def check_key(key: str) -> None:
    """Raises DestinationError for a key that no function of this module makes: absolute, ``..``, hidden, in a tree."""
    parts = key.split("/")
    if not all(_KEY_PART.fullmatch(part) for part in parts) or in_tree(key):
        raise DestinationError(f"{key!r} is not a key", hint="keys are made by storage.layout only")


def check_prefix(prefix: str) -> None:
    """Raises DestinationError for what no key begins with: absolute, or with ``..``."""
    if ".." in prefix.split("/") or prefix.startswith("/"):
        raise DestinationError(f"{prefix!r} is not the beginning of a key")


def check_tree(tree: str) -> None:
    """Raises DestinationError unless ``tree`` came from ``tree_name``."""
    owner = backup_of(tree)
    if owner is None or tree_name(*owner) != tree:
        raise DestinationError(f"{tree!r} is not a tree", hint="trees are named by storage.layout only")


def _object(name: str) -> str:
    if not is_object_name(name):
        raise DamagedError(
            f"{name[:120]!r} is not an object's name",
            [f"object name {name[:120]!r}"],
            hint="the manifest that names it was altered; use another copy of the backup",
        )
    return name


def _server(name: str) -> str:
    if not is_name(name):
        raise UsageError(f"{name!r} cannot be the name of a server")
    return name


def _digits(number: int, count: int) -> str:
    text = f"{number:0{count}d}"
    if number < 0 or len(text) > count:
        raise UsageError(f"{number} cannot be in the name of an archived binary log: 0 to {10**count - 1} can")
    return text


def _id(text: str) -> str:
    if not is_id(text):
        raise UsageError(f"{text!r} is not the id of a backup, restore, job or branch")
    return text


# Names inside a tree


def tree_path(entry_path: str, part_index: int | None = None) -> str:
    """Path inside the tree under which an entry is shown; no two (entry, part) pairs share one.

    ``part_index`` None: the entry is one part (``shop/t.ibd.zst.gpg``); else one of several
    (``shop/t.ibd.parts/00000.zst.gpg``). A name that would be too long or could be taken for one of ours keeps its
    beginning and gets ``~`` and 32 hex of its SHA-256; the manifest has the full name.
    Raises ValueError for a path that is not plainly relative.
    """
    folders, name = _split(entry_path)
    shown = _shown(name, folder=False)
    last = f"{shown}{SEALED}" if part_index is None else f"{shown}{_PARTS}/{part_index:05d}{SEALED}"
    return "/".join([*(_shown(folder, folder=True) for folder in folders), last])


def bundle_path(folder: str, object_name: str) -> str:
    """Path inside the tree of a bundle; ``folder`` is what all its members have in common ("" for the top)."""
    shown = f"{_BUNDLE}{hashlib.sha256(object_name.encode()).hexdigest()[:16]}.tar{SEALED}"
    folders = _split(f"{folder}/x")[0] if folder else []
    return "/".join([*(_shown(part, folder=True) for part in folders), shown])


def common_folder(paths: Iterable[str]) -> str:
    """The innermost folder that holds all of ``paths``; "" for the top."""
    return functools.reduce(_common, (path.rpartition("/")[0] for path in paths))


def tree_links(entries: Iterable[Entry]) -> Iterator[tuple[str, str]]:
    """(path inside the tree, object name) of everything that the tree of a backup with ``entries`` shows."""
    bundles: dict[str, str] = {}
    for entry in entries:
        if entry.bundle:
            folder = entry.path.rpartition("/")[0]
            bundles[entry.bundle] = _common(bundles.get(entry.bundle, folder), folder)
        elif len(entry.parts) == 1:
            yield tree_path(entry.path), entry.parts[0].object
        else:
            for index, part in enumerate(entry.parts):
                yield tree_path(entry.path, index), part.object
    for name, folder in bundles.items():
        yield bundle_path(folder, name), name


def check_tree_path(path: str) -> None:
    """Raises DestinationError unless ``path`` stays inside a tree and fits into file names."""
    try:
        folders, name = _split(path)
    except ValueError as error:
        raise DestinationError(f"{path!r} cannot be shown in a tree: {error}") from error
    for part in (*folders, name):
        if len(_bytes(part)) > _NAME_MAX:
            raise DestinationError(f"{path!r} cannot be shown in a tree: a name is over {_NAME_MAX} bytes long")


def _split(path: str) -> tuple[list[str], str]:
    parts = path.split("/")
    if "\0" in path or any(part in {"", ".", ".."} for part in parts):
        raise ValueError(f"{path!r} is not a plain relative path")
    return parts[:-1], parts[-1]


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _shown(name: str, *, folder: bool) -> str:
    """``name``, or its beginning + ``~`` + hash.

    A name is shown as it is only if it holds no ``~`` and cannot be read as one of our own: folders never end like
    our files and ``.parts`` folders do, files never begin like a bundle.
    """
    room = _NAME_MAX if folder else _NAME_MAX - len(SEALED)
    raw = _bytes(name)
    ours = name.endswith((_PARTS, SEALED)) if folder else name.startswith(_BUNDLE)
    if "~" not in name and not ours and len(raw) <= room:
        return name
    # Cutting may split a multi-byte character: "ignore" drops the broken end. The hash alone distinguishes names.
    beginning = raw[: room - 33].decode("utf-8", "ignore").replace("~", "_")
    return f"{beginning}~{hashlib.sha256(raw).hexdigest()[:32]}"


def _common(one: str, other: str) -> str:
    shared: list[str] = []
    for left, right in zip(one.split("/"), other.split("/"), strict=False):
        if left != right:
            break
        shared.append(left)
    return "/".join(shared)
