"""Incidents whose end nobody would notice: what they are about is not configured any more."""

from __future__ import annotations

from contextlib import suppress

from backupd.alerts.channels import DeliveryError
from backupd.alerts.rules import JOB, UNDELIVERABLE, topic_of
from backupd.app.alerting.channels import CHANNELS, EMAIL, names, recipient
from backupd.app.alerting.watchdog_ping import HEARTBEAT
from backupd.app.backups.rotation_hooks import HOOK
from backupd.app.context.incidents import API, DESTINATION, PLACE_RPO, PURGE, RPO, RTO, SLOW, SPOOL, STREAM
from backupd.app.context.settings import ServerSettings, Settings
from backupd.app.context.wiring import Wiring
from backupd.app.copies.replication_watch import LEG
from backupd.model.event import Incident
from policies.lint import streams

_OF_STREAMS = frozenset(topic_of(pair.broken) for pair in (STREAM, SPOOL, PURGE))
_OF_PLACES = frozenset(
    {
        DESTINATION.broken,
        PLACE_RPO.broken,
        SLOW.broken,
        "replication",
        "destination-unreachable",
        "destination-filling",
        "copies-failed",
        "copies-damaged",
        "removal-locked",
        "removal-braked",
        "manifests-missing",
        "rot-found",
    }
)
"""Topics of which the subject is a destination."""
_OF_COPIES = frozenset({DESTINATION.broken, SLOW.broken, "replication"})
"""And one of the server's policy."""


def why_unwatched(wiring: Wiring, incident: Incident) -> str:
    """Why nobody looks any more whether it is over; empty where somebody does. Raises CatalogError."""
    settings, server = wiring.settings, incident.server
    topic, place = topic_of(incident.kind), incident.subject
    if topic == HOOK.broken and wiring.catalog.absences.of(server) is not None:
        return ""  # whatever the configuration says, the service brings it back
    if server and server not in settings.servers:
        return f"{server} is not configured any more"
    if topic in _OF_PLACES and place and place not in settings.destinations:
        return f"destination {place} is not configured any more"
    return _of_policy(settings, incident, topic) if server else _of_service(settings, topic, place)


def _of_service(settings: Settings, topic: str, subject: str) -> str:
    if topic == HEARTBEAT.broken and settings.alerts.heartbeat is None:
        return "alerts.heartbeat is not set any more"
    if topic == API.broken and not settings.api.enabled:
        return "the web page and the REST interface are switched off"
    return _of_channel(settings, subject) if topic == UNDELIVERABLE else ""


def _of_policy(settings: Settings, incident: Incident, topic: str) -> str:
    server, place = settings.server(incident.server), incident.subject
    if not server.usable:
        return ""
    return _of_promise(server, topic, place) or _of_paths(server, topic, place)


def _of_promise(server: ServerSettings, topic: str, place: str) -> str:
    promised = server.policy.objectives
    if topic in (RPO.broken, PLACE_RPO.broken) and promised.rpo is None:
        return f"objectives.rpo of {server.name} is not promised any more"
    if topic == RTO.broken and promised.rto is None:
        return f"objectives.rto of {server.name} is not promised any more"
    if topic == PLACE_RPO.broken and (place not in server.preferred or len(server.preferred) < 2):
        return f"{place} is not among several destinations of {server.name} any more"
    return ""


def _of_paths(server: ServerSettings, topic: str, place: str) -> str:
    if topic == JOB and place.startswith(LEG):
        place = place.removeprefix(LEG)
        topic = "replication"
    if topic in _OF_COPIES and place not in server.preferred:
        return f"{place} is no destination of {server.name} any more"
    if topic in _OF_STREAMS and not streams(server.policy):
        return f"the binary log of {server.name} is not streamed any more"
    return ""


def _of_channel(settings: Settings, channel: str) -> str:
    if channel == EMAIL:
        return "" if settings.alerts.email is not None else "alerts.email is not set any more"
    if channel.startswith(recipient("")):
        return "" if channel in _readers(settings) else f"{channel.removeprefix(recipient(''))} gets no mail any more"
    if settings.alerts.channels_file is None:
        return "alerts.channels_file is not set any more"
    if channel != CHANNELS:
        with suppress(DeliveryError):  # told by whoever sends
            return "" if channel in names(settings) else f"channel {channel} is not in alerts.channels_file any more"
    return ""


def _readers(settings: Settings) -> frozenset[str]:
    email = settings.alerts.email
    return frozenset(map(recipient, email.to)) if email is not None else frozenset()
