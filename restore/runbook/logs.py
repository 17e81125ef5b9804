"""The steps of a runbook that bring a later moment than the backup's: archived binary logs, chosen, opened, put
together and applied by ``sh`` with gpg, zstd, awk and the database's own programs.

With ``TO`` empty they do nothing. The history is chosen by the clear descriptions beside the logs, as
``backupd.recovery`` does it, and what is not certain stops. The place to stop at is found in the sealed indexes, so it
is right to the microsecond and between two transactions, which a reader's own options are not.

Descriptions are copied before they are looked at, so that nobody who can write there changes them in between. Where a
server is signed they count only with the signature of ``SIGNER``, and only in the folder that they tell of.
"""

from __future__ import annotations

from datetime import datetime

from backupd.engine.instance.launch import OWN_ACCOUNT, Options, global_zone, zone_of
from backupd.model.manifest import Body, Header
from backupd.model.server_facts import Flavour, ServerInfo, Version
from backupd.model.text import format_time
from restore.runbook.shared_steps import WORK, begun, option_file, programs_of, quote
from restore.runbook.texts import shell
from storage.contract import layout

_ALWAYS: Options = {
    "innodb_flush_log_at_trx_commit": "0",
    "max_allowed_packet": "1073741824",
    "loose_server_audit": "OFF",
    "loose_audit_log": "OFF",
    "loose_group_replication": "OFF",
}
_MYSQL: Options = {
    # Takes transactions with GTIDs and without, and notes those of the source as executed.
    "gtid_mode": "OFF_PERMISSIVE",
    "enforce_gtid_consistency": "OFF",
    "loose_persisted_globals_load": "OFF",
}
_HAS_VERSIONING = Version(10, 3)
_ACCOUNT = '--defaults-file="$WORK/run/client.cnf" --socket="$WORK/run/s.sock"'


def choose_logs(header: Header, body: Body, *, signed: bool) -> str:
    """What is needed of the archive, as files in ``$WORK/logs``. ``signed``: only what SIGNER has signed; the step
    before defines what looks at that."""
    position = body.facts.position
    return shell(
        "logs",
        "choose",
        logs=layout.binlogs_folder(header.server).rstrip("/"),
        started=_padded(header.started_at),
        finished=_padded(header.finished_at),
        uuid=quote(body.facts.server.server_uuid),
        gtid=quote("".join(position.gtid.split())),
        file=int(position.file.rpartition(".")[2]),
        pos=position.pos,
        reader=programs_of(body.facts.server).reader,
        look="\n" + shell("logs", "look") if signed else "",
    )


def apply_logs(header: Header, info: ServerInfo) -> str:
    """The logs, applied to the copy before it is put in place."""
    programs = programs_of(info)
    mariadb = info.flavour is Flavour.MARIADB
    # As the server's own applier has it: the source may have allowed it where the logs do not tell.
    versions = mariadb and info.version >= _HAS_VERSIONING
    session = ["SET SESSION system_versioning_alter_history = KEEP"] if versions else []
    if zone := global_zone(info.variables):
        session.append(f"SET SESSION time_zone = '{zone}'")
    more = _ALWAYS if mariadb else {**_ALWAYS, **_MYSQL}
    copy = WORK / "data"
    return shell(
        "logs",
        "apply",
        options=option_file(programs, info, datadir=copy, found=copy, own_account=True, more=more),
        begun=begun(programs, _ACCOUNT, environment='env ${ZONE:+TZ="$ZONE"} '),
        zone=zone_of(info.variables, header.finished_at, header.finished_at).name,
        account=OWN_ACCOUNT,
        client=f"{programs.client} {_ACCOUNT}",
        reader=f"{programs.reader} --no-defaults",
        reading=" --loose-gtid-strict-mode=0" if mariadb else "",
        session="\n".join(f"        echo {quote(line + ';')}" for line in session),
    )


def _padded(moment: datetime) -> str:
    """With all digits, so that times compare as text."""
    whole, _, part = format_time(moment).removesuffix("Z").partition(".")
    return f"{whole}.{part:0<6}"
