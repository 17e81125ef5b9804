"""Which place a destination is, whatever a configuration calls it: by the id in the marker that it was given."""

from __future__ import annotations

import json

from backupd.model.errors import ObjectMissingError
from backupd.model.text import parse_time
from storage.contract import layout
from storage.contract.destination import Destination, read_note


def repository_id(destination: Destination) -> str | None:
    """The same under every name and by every way that leads there. None where the marker tells none: one that nobody
    can read, or a destination that needs no marker. Raises DestinationError where the place does not answer."""
    try:
        document = read_note(destination, layout.REPOSITORY)
    except (ObjectMissingError, ValueError):
        return None
    told = document.get("id") if isinstance(document, dict) else None
    return told if isinstance(told, str) and told else None


def marker_problem(found: bytes, noted: bytes | None) -> str:
    """Why the marker ``found`` at a place is not as it was written; "" where it is. ``noted``: what was seen there
    earlier, None for nothing. One with another id that was made later is of a place that was made anew."""
    if found == noted:
        return ""
    try:
        document = json.loads(found)
        same = (json.dumps(document, sort_keys=True, indent=2) + "\n").encode() == found
        made = parse_time(document["created_at"])
        known = isinstance(document["id"], str) and isinstance(document["format"], int | str)
        before = json.loads(noted) if noted is not None else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return "it is no marker of a repository: its bytes differ from what was written"
    if not same or not known:
        return "its bytes differ from what was written"
    if before is None or (document["id"] != before["id"] and made > parse_time(before["created_at"])):
        return ""
    return f"it differs from what was seen there before (its id was {before['id']})"
