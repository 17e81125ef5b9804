from __future__ import annotations

from dataclasses import replace

from backupd.model.server_facts import ExternalPath, Flavour, Position, Role
from restore.fetch.sources import remarks
from restore.replica.old_settings import replica_remarks
from tests.support.restores.taken import Taken


def test_what_makes_a_mariadb_copy_a_replica_again_is_given_without_secrets(taken: Taken) -> None:
    facts = replace(taken.body.facts, position=Position("bin.000004", 77, "0-1-42"))
    recorded = "CHANGE MASTER TO MASTER_PASSWORD='top\\'s',\n  MASTER_USE_GTID=slave_pos;"
    followed = replace(facts, receipts=replace(facts.receipts, replica_of=recorded))
    text = "\n".join(replica_remarks(followed, followed.position))
    assert "SET GLOBAL gtid_slave_pos='0-1-42'" in text
    assert "gtid_slave_pos came with the data" in text
    assert "MASTER_HOST='HOST'" in text
    assert "top" not in text
    assert "', MASTER_PORT=PORT, MASTER_USER='USER'" in text, "the source listens on a socket only"
    listening = replace(followed, server=replace(facts.server, variables={"port": "4406"}))
    assert "', MASTER_PORT=4406, MASTER_USER='USER'" in "\n".join(replica_remarks(listening, listening.position))
    alone = "\n".join(replica_remarks(facts, facts.position))
    assert "the source that" not in alone or facts.server.role is Role.REPLICA
    old = replace(facts, position=Position("bin.000004", 77))
    assert "MASTER_LOG_FILE='bin.000004', MASTER_LOG_POS=77" in "\n".join(replica_remarks(old, old.position))
    mysql = replace(facts, server=replace(facts.server, flavour=Flavour.MYSQL))
    assert replica_remarks(mysql, mysql.position) == ()
    (forward,) = replica_remarks(mysql, Position("bin.000005", 4, "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-9"))
    assert "set them again" in forward
    assert ":1-9 is executed" in forward


def test_the_remark_about_paths_elsewhere_says_where_each_kind_goes(taken: Taken) -> None:
    paths = (ExternalPath("tablespace", "a/b", "/x/a/b.ibd"), ExternalPath("undo", "undo", "/y"))
    (text,) = remarks(replace(taken.body.facts.server, encrypted=(), external=paths))
    assert "1 tablespaces go to <datadir>.external beside the new data directory" in text
    assert "undo goes inside" in text
    assert "tablespace goes inside" not in text
