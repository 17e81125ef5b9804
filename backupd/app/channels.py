"""The ways to people that the settings name: what a letter becomes on each, and handing it over."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from backupd.alerts.channels import notify, read_channels
from backupd.alerts.delivery import Delivered, DeliveryError
from backupd.alerts.email import Envelope, as_mail, send
from backupd.alerts.letter import Letter
from backupd.alerts.wording import Site
from backupd.app.settings import Settings
from backupd.model.ids import new_id
from backupd.model.incident import Message, MessageKind, MessageState

EMAIL = "email"
CHANNELS = "channels"
"""How the file of other channels is called where it cannot be read."""


def site_of(settings: Settings) -> Site:
    """Who writes, and where the page is."""
    api = settings.api
    scheme = "https" if api.tls is not None else "http"
    return Site(socket.gethostname(), (api.url or f"{scheme}://{api.listen}") if api.enabled else "")


def names(settings: Settings) -> tuple[str, ...]:
    """Of all channels. Raises DeliveryError when the file of the others than mail cannot be read."""
    file = settings.alerts.channels_file
    return (*mail_name(settings), *(read_channels(file) if file is not None else ()))


def mail_name(settings: Settings) -> tuple[str, ...]:
    return (EMAIL,) if settings.alerts.email is not None else ()


def written(settings: Settings, channels: Sequence[str], letter: Letter, kind: MessageKind, now: datetime, *,
            thread: Sequence[str] = (), begins: bool = False) -> list[Message]:
    """The messages that ``letter`` becomes, one for each channel, due at once. ``thread``: ids of the incidents that it
    is about; ``begins``: it is the first one about the first of them."""
    email, found = settings.alerts.email, []
    for channel in channels:
        message = Message(new_id(now), channel, kind, MessageState.QUEUED, letter.subject_line, (channel,), "", now,
                          incident_id=thread[0] if thread else "", next_try=now)
        if channel == EMAIL and email is not None:
            content = as_mail(letter, email, Envelope(message.id, now, tuple(thread), begins), socket.gethostname())
            message = replace(message, recipients=email.to, content=content)
        else:
            message = replace(message, content=letter.as_text())
        found.append(message)
    return found


def deliver(settings: Settings, message: Message) -> Delivered:
    """Hand it over. Raises DeliveryError."""
    email, file = settings.alerts.email, settings.alerts.channels_file
    if message.channel == EMAIL:
        if email is None:
            raise DeliveryError("alerts.email is not set any more", permanent=True)
        return send(email, message.content, message.recipients)
    known = read_channels(file) if file is not None else {}
    if message.channel not in known:
        raise DeliveryError(f"channel {message.channel} is not in alerts.channels_file any more", permanent=True)
    return notify(message.channel, known[message.channel], message.subject, message.content)
