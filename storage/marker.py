"""Which place a destination is, whatever a configuration calls it: by the id in the marker that it was given."""

from __future__ import annotations

import json

from backupd.model.errors import ObjectMissingError
from storage import layout
from storage.destination import Destination


def repository_id(destination: Destination) -> str | None:
    """The same under every name and by every way that leads there. None where the marker tells none: one that nobody
    can read, or a destination that needs no marker. Raises DestinationError where the place does not answer."""
    try:
        with destination.get(layout.REPOSITORY) as stream:
            document = json.loads(stream.read())
    except (ObjectMissingError, ValueError):
        return None
    told = document.get("id") if isinstance(document, dict) else None
    return told if isinstance(told, str) and told else None
