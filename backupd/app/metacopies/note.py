"""The note in the spool of what was put last at which destination: copies of catalog and configuration. It cannot stand
in the catalog, whose copy would be another one each time."""

from __future__ import annotations

import json
from pathlib import Path

from backupd.process.folders import write_whole
from storage.contract import layout

COPY_NOTE = "copies.json"
"""Its name in the spool."""


class CopyNote:
    """Digests in the spool: by destination and folder of the content of what was put last, and by destination and key
    of each copy as it was stored. Losing it costs one more copy."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        self._digests: dict[str, str] = found if isinstance(found, dict) else {}

    def get(self, destination: str, folder: str) -> str | None:
        return self._digests.get(f"{destination}/{folder}")

    def stored(self, destination: str) -> dict[str, str]:
        """Of each copy that was put there, by key."""
        found = {
            name.removeprefix(f"{destination}/"): digest
            for name, digest in self._digests.items()
            if name.startswith(f"{destination}/")
        }
        return {key: digest for key, digest in found.items() if layout.copy_of(key) is not None}

    def set(self, destination: str, folder: str, digest: str) -> None:
        self._digests[f"{destination}/{folder}"] = digest
        self._write()

    def marker(self, destination: str) -> bytes | None:
        """The marker of the place, as it was seen there."""
        found = self.get(destination, layout.REPOSITORY)
        return found.encode() if found is not None else None

    def forget(self, destination: str, key: str) -> None:
        if self._digests.pop(f"{destination}/{key}", None) is not None:
            self._write()

    def _write(self) -> None:
        write_whole(self._file, json.dumps(self._digests, sort_keys=True).encode())
