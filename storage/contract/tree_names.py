"""How the files of a backup are called in its browsable tree of links."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator

from backupd.model.errors import DestinationError
from backupd.model.manifest import Entry
from storage.contract.layout import SEALED

_PARTS = ".parts"
_BUNDLE = ".bundle-"
_NAME_MAX = 255
"""Bytes in one file name on every Linux file system that matters."""


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
    # Cutting may split a multi-byte character: "ignore" drops the broken end. The hash alone tells names apart.
    beginning = raw[: room - 33].decode("utf-8", "ignore").replace("~", "_")
    return f"{beginning}~{hashlib.sha256(raw).hexdigest()[:32]}"


def _common(one: str, other: str) -> str:
    shared: list[str] = []
    for left, right in zip(one.split("/"), other.split("/"), strict=False):
        if left != right:
            break
        shared.append(left)
    return "/".join(shared)
