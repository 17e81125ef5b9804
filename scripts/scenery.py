"""What the demo plays in front of: configurations, policies, accounts, a bucket."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from stage import say

from tests.support.keys import Keys
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_USER, PrivateServer
from tests.support.stores.folders import give_to_database, runs_as_root, short_directory
from tests.support.stores.s3_server import S3Server, why_not

SERVER = "shop-db1"
WRITER = "restorer"
"""The account that restores tables into the running server; that of the backups may only read."""
CONFIGURATION = """\
catalog: sqlite:///{base}/catalog.db
spool: {base}/spool
policies: {base}/policies
servers:
  {server}:
    {{socket: {socket}, defaults_file: {client}, restore_defaults_file: {writer}, policy: demo, owner: {owner}}}
destinations:
  local: {{type: filesystem, path: {base}/backups}}
  offsite: {bucket}
encryption: {{gnupg_home: {keys.public_home}, recipients: [{keys.user_id}]}}
restore:
  gnupg_home: {keys.secret_home}
  scratch: {{path: {base}/scratch, memory: 512MiB}}
  folders: [{base}/restores]
api: {{listen: "127.0.0.1:{port}"}}
alerts:
  email: {{smtp: "smtp://127.0.0.1:{mail_port}", from: backupd@example.com, to: [dba@example.com]}}
"""
ELSEWHERE = """\
catalog: sqlite:///{base}/catalog.db
spool: {base}/spool
policies: {base}/policies
servers:
  {server}: {{policy: demo, owner: {owner}}}
destinations:
  offsite: {bucket}
encryption: {{gnupg_home: {keys.public_home}, recipients: [{keys.user_id}], trusted_signers: [{signer}]}}
restore: {{gnupg_home: {keys.secret_home}, scratch: {{path: {base}/scratch, memory: 512MiB}}}}
"""
"""Another machine, which has nothing but the private key, the address of the bucket, and the page with the signer."""
POLICY_ELSEWHERE = """\
physical: {full: "0 2 * * sun"}
signed: true
destinations: {required: [offsite]}
"""
POLICY = """\
physical: {full: "0 2 * * sun", incremental: every 1m}
logical: {schedule: "0 4 * * *", tables: {include: ["shop.*"]}}
binlog: {checkpoint: 2s}
destinations: {required: [local], others: [offsite]}
retention:
  local: {keep_fulls: 1}
test_restore:
  checks:
    - sql: "SELECT SUM(balance) = 2000000 FROM bank.accounts"
    - sql: "SELECT COUNT(*) > 0 FROM shop.order_totals"
"""


def database_user() -> str:
    return "mysql" if runs_as_root() else os.environ.get("USER", "")


def write_configuration(
    base: Path, server: PrivateServer, keys: Keys, bucket: str, *, port: int, mail_port: int
) -> Path:
    """``port`` of the REST interface, ``mail_port`` of the mail server."""
    for name in ("backups", "restores", "scratch", "spool"):
        (base / name).mkdir()
    give_to_database(base / "scratch")
    (base / "policies").mkdir()
    (base / "policies" / "demo.yaml").write_text(POLICY)
    config = base / "backupd.yaml"
    config.write_text(
        CONFIGURATION.format(
            base=base,
            server=SERVER,
            socket=server.socket,
            keys=keys,
            client=server.client_file(SERVICE_USER, SERVICE_PASSWORD),
            writer=server.client_file(WRITER, SERVICE_PASSWORD),
            owner=database_user(),
            bucket=bucket,
            port=port,
            mail_port=mail_port,
        )
    )
    return config


def sign_with(config: Path, line: str) -> None:
    """Add ``line``, which names the signing key, to what the configuration says of encryption."""
    config.write_text(config.read_text().replace("encryption: {", f"encryption: {{{line}, "))


def configuration_elsewhere(base: Path, keys: Keys, bucket: str, signer: str) -> Path:
    """Of the other machine, in an empty folder; ``signer``: as the page outside of the store tells it."""
    for name in ("policies", "scratch"):
        (base / name).mkdir(parents=True)
    give_to_database(base / "scratch")
    (base / "policies" / "demo.yaml").write_text(POLICY_ELSEWHERE)
    config = base / "backupd.yaml"
    config.write_text(
        ELSEWHERE.format(base=base, server=SERVER, owner=database_user(), bucket=bucket, keys=keys, signer=signer)
    )
    return config


@contextlib.contextmanager
def a_bucket() -> Iterator[str]:
    """What the configuration says about a bucket of a real S3 server. Where that cannot be had, another folder stands
    in for it."""
    if why := why_not():
        say(f"{why}: a folder stands in for the bucket")
        with short_directory("bd-") as folder:
            yield json.dumps({"type": "filesystem", "path": str(folder / "offsite")})
        return
    with S3Server() as store:
        yield json.dumps(store.bucket("acme-backups"), default=str)
