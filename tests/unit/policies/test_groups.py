"""Groups: what a group and its members may say, and what follows from it; everything wrong is told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.handed import Loaded, revived
from policies.load import load
from tests.support.catalog.configuration_files import CONFIGURATION, POLICY, problems, write

MEMBERS = "  shop-db1: {host: db1, user: backup}\n  shop-db2: {host: db2, defaults_file: db2.cnf}\n"
MEANT = "; did you mean `shop-db1` or `{}`?"
GROUP = "  shop: {members: [shop-db1, shop-db2], prefer: source, max_lag: 90s, failover_after: 2m, policy: gold}\n"


def configured(servers: str) -> str:
    return CONFIGURATION.replace("  db1: {policy: gold}\n", servers)


def test_a_group_is_the_server_and_its_members_are_none(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, configured(MEMBERS + GROUP)))
    assert list(loaded.configuration.servers) == ["shop"]
    group = loaded.configuration.servers["shop"]
    assert (group.members, group.prefer, str(group.max_lag)) == (("shop-db1", "shop-db2"), "source", "0:01:30")
    assert loaded.groups == {"shop-db1": "shop", "shop-db2": "shop"}
    assert {name: (one.host, one.policy) for name, one in loaded.members.items()} == {
        "shop-db1": ("db1", "gold"),
        "shop-db2": ("db2", "gold"),
    }


def test_a_group_prefers_replicas_where_it_does_not_say(tmp_path: Path) -> None:
    text = configured(MEMBERS + "  shop: {members: [shop-db1, shop-db2], policy: gold}\n")
    group = load(write(tmp_path, text)).configuration.servers["shop"]
    assert (group.prefer, group.max_lag.total_seconds(), group.failover_after.total_seconds()) == ("replica", 60, 300)


def test_group_and_members_may_be_in_different_files_and_the_policy_come_by_label(tmp_path: Path) -> None:
    rules = "policies_by_label:\n  - {labels: {env: prod}, policy: gold}\n"
    path = write(tmp_path, rules + configured("  shop: {members: [shop-db1, shop-db2], labels: {env: prod}}\n"))
    (tmp_path / "servers.d").mkdir()
    (tmp_path / "servers.d" / "a.yaml").write_text(MEMBERS.replace("  shop", "shop"))
    loaded = load(path)
    assert list(loaded.configuration.servers) == ["shop"]
    assert {one.policy for one in loaded.members.values()} == {"gold"}
    assert loaded.members["shop-db2"].defaults_file == tmp_path / "servers.d" / "db2.cnf"


def test_what_is_handed_on_is_the_same(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, configured(MEMBERS + GROUP)))
    again = revived(loaded.document)

    def shown(one: Loaded) -> tuple[object, ...]:
        return dict(one.configuration.servers), dict(one.members), dict(one.groups)

    assert shown(again) == shown(loaded)


def test_everything_that_is_wrong_with_groups_is_told_at_once_with_file_and_line(tmp_path: Path) -> None:
    servers = """\
  shop:
    members: [shop-db1, shop-db3, shop-db1, other]
    prefer: newest
    former_servers: [shop-db2]
    host: proxy
    policy: gold
  other: {members: [shop-db1], policy: gold}
  shop-db1: {host: db1, policy: silver, labels: {env: prod}}
  shop-db2: {host: db2, max_lag: 5s, policy: gold}
  none: {members: [], policy: gold}
"""
    path = write(tmp_path, configured(servers), gold=POLICY, silver=POLICY)
    assert sorted(one[1:] for one in problems(path)) == [
        (3, "servers.shop.members[1]", f"no server `shop-db3` among the servers{MEANT.format('shop-db2')}"),
        (3, "servers.shop.members[2]", "`shop-db1` is a member again (line 3): a server is in one group, once"),
        (3, "servers.shop.members[3]", "`other` is a group: a group has no groups as members"),
        (4, "servers.shop.prefer", "must be 'replica', 'source' or 'any'"),
        (5, "servers.shop.former_servers[0]", f"`shop-db2` is no member of `shop`{MEANT.format('shop-db3')}"),
        (6, "servers.shop.host", "a group has no address: write it for each of its members"),
        (8, "servers.other.members[0]", "`shop-db1` is a member of `shop`, too: a server is in one group, once"),
        (9, "servers.shop-db1.labels", "`shop-db1` is a member of `shop`, which alone has `labels`: write it there"),
        (9, "servers.shop-db1.policy", "`shop-db1` is a member of `shop`, which alone has `policy`: write it there"),
        (10, "servers.shop-db2.max_lag", "is of groups, and this server has no `members`"),
        (11, "servers.none.members", "must not be empty"),
    ]


@pytest.mark.parametrize("broken", ["a", "b"])
def test_where_a_file_is_left_out_no_member_becomes_a_server(tmp_path: Path, broken: str) -> None:
    path = write(tmp_path)
    (tmp_path / "servers.d").mkdir()
    files = {"a": GROUP.replace("  shop:", "shop:"), "b": MEMBERS.replace("  shop", "shop")}
    for name, text in files.items():
        wrong = "else: {host: x, prot: 1, policy: gold}\n" if name == broken else ""
        (tmp_path / "servers.d" / f"{name}.yaml").write_text(text + wrong)
    loaded = load(path, whole=False)
    assert [Path(one.file).name for one in loaded.unread] == [f"{broken}.yaml"]
    assert not loaded.configuration.servers.keys() & {"shop-db1", "shop-db2"}
    assert set(loaded.members) == (set() if broken == "b" else {"shop-db1", "shop-db2"})
