"""Servers of a folder of files, and policies by label: what is there is read or refused, never passed over."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backupd.model.errors import ConfigurationError
from policies.load import load
from policies.servers import MAX_FILES, read_folder
from tests.support.catalog.configuration_files import CONFIGURATION, POLICY, problems, write

WITHOUT = CONFIGURATION.replace("servers:\n  db1: {policy: gold}\n", "")
BY_LABEL = """\
policies_by_label:
  - {labels: {env: prod}, policy: gold}
  - {labels: {env: test, site: berlin}, policy: bronze}
"""


@contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def add(folder: Path, **files: str) -> Path:
    """Files of ``servers.d``."""
    (folder / "servers.d").mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / "servers.d" / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / "servers.d"


def test_servers_of_the_folder_join_those_of_the_configuration_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    add(tmp_path, b="db3: {policy: gold}\n", a="db2: {policy: gold, defaults_file: db2.cnf}\n")
    loaded = load(path)
    assert list(loaded.configuration.servers) == ["db1", "db2", "db3"]
    assert loaded.files == {"db2": tmp_path / "servers.d" / "a.yaml", "db3": tmp_path / "servers.d" / "b.yaml"}
    assert loaded.configuration.servers["db2"].defaults_file == tmp_path / "servers.d" / "db2.cnf"


def test_all_servers_may_be_in_the_folder(tmp_path: Path) -> None:
    path = write(tmp_path, WITHOUT)
    assert [one[1:3] for one in problems(path)] == [(1, "servers")]
    add(tmp_path, a="db2: {policy: gold}\n")
    assert list(load(path).configuration.servers) == ["db2"]


def test_the_folder_may_be_elsewhere_and_then_it_has_to_exist(tmp_path: Path) -> None:
    path = write(tmp_path, "servers_folder: fleet\n" + CONFIGURATION)
    assert problems(path) == [
        ("backupd.yaml", 1, "servers_folder", f"the folder {tmp_path / 'fleet'} does not exist"),
    ]
    add(tmp_path, a="db2: {policy: gold}\n").rename(tmp_path / "fleet")
    assert list(load(path).configuration.servers) == ["db1", "db2"]


def test_a_folder_that_is_named_and_holds_no_file_of_servers_is_refused(tmp_path: Path) -> None:
    """It may be a place where nothing is mounted."""
    path = write(tmp_path, "servers_folder: servers.d\n" + CONFIGURATION)
    add(tmp_path)
    (wrong,) = problems(path)
    folder = tmp_path / "servers.d"
    assert wrong[1:] == (1, "servers_folder", f"the folder {folder} holds no file of servers: is it mounted?")
    write(tmp_path)
    assert list(load(path).configuration.servers) == ["db1"]


def test_every_problem_of_every_file_is_told_at_once_with_its_line_and_field(tmp_path: Path) -> None:
    path = write(tmp_path, CONFIGURATION.replace("{policy: gold}", "{policy: gold, prot: 1}"))
    add(
        tmp_path,
        a="db2:\n  policy: gold\n  hots: db2.example.com\n",
        b="db3: {}\n\ndb 4: {policy: gold}\n",
        c="db5: {policy: golf}\n",
        d="",
        e="servers:\n  db6: {policy: gold}\n",
        f="- db7\n",
        g="db8: [\n",
    )
    found = problems(path)
    assert [one[:3] for one in found] == [
        ("backupd.yaml", 2, "servers.db1.prot"),
        ("a.yaml", 3, "db2.hots"),
        ("b.yaml", 1, "db3.policy"),
        ("b.yaml", 3, "db 4"),
        ("c.yaml", 1, "db5.policy"),
        ("d.yaml", 1, ""),
        ("e.yaml", 1, "servers"),
        ("f.yaml", 1, ""),
        ("g.yaml", 2, ""),
    ]
    assert "did you mean `host`" in found[1][3]
    assert "May be left out where an entry of `policies_by_label`" in found[2][3]
    assert "no policy `golf`" in found[4][3]
    assert "begins with its servers: remove this line" in found[6][3]


def test_files_with_a_problem_can_be_left_out_and_are_told(tmp_path: Path) -> None:
    path = write(tmp_path)
    folder = add(
        tmp_path,
        broken="db2: [\n",
        double="db1: {policy: gold}\ndb7: {policy: gold}\n",
        good="db3: {policy: gold}\n",
        unknown="db4: {policy: gold, nonsense: 1}\n",
    )
    (folder / "no.yml").write_text("db5: {policy: gold}\n")
    loaded = load(path, whole=False)
    assert list(loaded.configuration.servers) == ["db1", "db3"]
    assert list(loaded.files) == ["db3"]
    names = {Path(one.file).name for one in loaded.unread}
    assert names == {"broken.yaml", "double.yaml", "unknown.yaml", "servers.d"}
    assert [servers for _file, servers in loaded.document["servers"]] == [
        {"db1": loaded.document["servers"][0][1]["db1"]},
        {"db3": {"policy": "gold"}},
    ]
    assert len(problems(path)) == len(loaded.unread), "whoever does not ask for it is refused"


def test_a_folder_without_one_good_file_is_refused_where_no_other_file_has_servers(tmp_path: Path) -> None:
    path = write(tmp_path, WITHOUT)
    add(tmp_path, broken="db2: [\n")
    with pytest.raises(ConfigurationError, match="1 problem"):
        load(path, whole=False)


def test_a_server_of_two_files_is_refused_with_both_places(tmp_path: Path) -> None:
    path = write(tmp_path)
    folder = add(tmp_path, a="db2: {policy: gold}\n", b="\ndb1: {policy: gold}\ndb2: {policy: gold}\n")
    assert problems(path) == [
        ("b.yaml", 2, "db1", f"server `db1` is in {path}, line 2, too: remove one"),
        ("b.yaml", 3, "db2", f"server `db2` is in {folder / 'a.yaml'}, line 1, too: remove one"),
    ]


def test_what_may_be_meant_as_a_file_of_servers_is_refused_where_it_is_none(tmp_path: Path) -> None:
    path = write(tmp_path)
    folder = add(tmp_path, good="db2: {policy: gold}\n")
    secret = tmp_path / "elsewhere.yaml"
    secret.write_text("db9: {policy: gold}\n")
    (folder / "outside.yaml").symlink_to(secret)
    (folder / "up.yaml").symlink_to("../elsewhere.yaml")
    (folder / "gone.yaml").symlink_to("nothing")
    (folder / "round.yaml").symlink_to("round.yaml")
    (folder / "old.yml").write_text("db8: {policy: gold}\n")
    (folder / "-x.yaml").write_text("")
    (folder / "a\x1b[2J\n.yaml").write_text("")
    os.mkfifo(folder / "pipe.yaml")
    (folder / "folder.yaml").mkdir()
    (folder / "deeper").mkdir()
    found = [(name, message) for name, _line, _field, message in problems(path)]
    assert sorted(found) == [
        ("folder.yaml", "is a folder, not a file"),
        ("gone.yaml", "does not exist"),
        ("pipe.yaml", "is not a regular file"),
        ("round.yaml", f"cannot be read: {os.strerror(40)}"),
        (
            "servers.d",
            "'-x.yaml' cannot be the name of a file of servers: letters, digits, '.', '_' and '-' only",
        ),
        (
            "servers.d",
            r"'a\x1b[2J\n.yaml' cannot be the name of a file of servers: letters, digits, '.', '_' and '-' only",
        ),
        ("servers.d", "'deeper' is a folder: only files of the folder itself are read"),
        ("servers.d", "'old.yml' would be ignored: name it old.yaml"),
        ("servers.d", f"'outside.yaml' is a link to '{secret}', outside of this folder: put the file itself here"),
        ("servers.d", f"'up.yaml' is a link to '{secret}', outside of this folder: put the file itself here"),
    ]


def test_a_file_or_folder_that_the_service_may_not_read_is_refused() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = write(Path(name))
        folder = add(Path(name), a="db2: {policy: gold}\n")
        Path(name).chmod(0o755)
        (folder / "a.yaml").chmod(0o600)
        with as_nobody():
            assert problems(path) == [("a.yaml", None, "", "cannot be read: Permission denied")]
        folder.chmod(0o700)
        with as_nobody():
            ((file, _line, _field, message),) = problems(path)
        assert file == "servers.d"
        assert "Permission denied" in message
        assert list(load(path).configuration.servers) == ["db1", "db2"]


def test_what_nobody_takes_for_one_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path)
    folder = add(tmp_path)
    for name in ("README", "db2.yaml.disabled", "db2.yaml~", ".db2.yaml.swp"):
        (folder / name).write_text("db2: [\n")
    (folder / ".#db2.yaml").symlink_to("root@host.1234")  # as Emacs locks a file
    assert list(load(path).configuration.servers) == ["db1"]


def test_files_mounted_as_kubernetes_does_it_are_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    folder = add(tmp_path)
    (folder / "..2026_11_28").mkdir()
    (folder / "..2026_11_28" / "a.yaml").write_text("db2: {policy: gold}\n")
    (folder / "..data").symlink_to("..2026_11_28")
    (folder / "a.yaml").symlink_to("..data/a.yaml")
    assert list(load(path).configuration.servers) == ["db1", "db2"]


@pytest.mark.parametrize("what", ["file", "link", "loop"])
def test_a_folder_that_is_none_is_refused_though_nobody_named_it(tmp_path: Path, what: str) -> None:
    path = write(tmp_path)
    if what == "file":
        (tmp_path / "servers.d").write_text("")
    else:
        (tmp_path / "servers.d").symlink_to("servers.d" if what == "loop" else "nowhere")
    ((name, _line, _field, message),) = problems(path)
    assert name == "servers.d"
    assert message.startswith(f"the folder {tmp_path / 'servers.d'} ")


def test_a_folder_of_very_many_files_is_refused_before_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("policies.servers.MAX_FILES", 2)
    folder = add(tmp_path, a="", b="", c="")
    read = read_folder(folder, named=None)
    assert [one.message for one in read.problems] == ["holds more than 2 files"]
    assert MAX_FILES == 10_000


def test_labels_give_a_policy_to_servers_that_name_none(tmp_path: Path) -> None:
    text = BY_LABEL + CONFIGURATION.replace("{policy: gold}", "{labels: {env: prod}}")
    path = write(tmp_path, text, gold=POLICY, bronze=POLICY)
    add(
        tmp_path,
        a="db2: {labels: {env: test, site: berlin}}\n"
        "db3: {labels: {env: prod, site: berlin}}\n"
        "db4: {labels: {env: prod}, policy: bronze}\n"
        "db5: &same {labels: {env: prod}}\n"
        "db6: *same\n",
    )
    servers = load(path).configuration.servers
    assert {name: one.policy for name, one in servers.items()} == {
        "db1": "gold",
        "db2": "bronze",
        "db3": "gold",
        "db4": "bronze",
        "db5": "gold",
        "db6": "gold",
    }
    assert servers["db2"].labels == {"env": "test", "site": "berlin"}


def test_a_server_without_a_policy_whose_labels_match_none_or_several_is_refused(tmp_path: Path) -> None:
    more = "  - {labels: {site: berlin}, policy: bronze}\n  - {labels: {env: prod, tier: a}, policy: gold}\n"
    path = write(tmp_path, BY_LABEL + more + CONFIGURATION, gold=POLICY, bronze=POLICY)
    add(
        tmp_path,
        a="db2: {labels: {env: test}}\n"
        "db3: {labels: {env: prod, site: berlin}}\n"
        "db4: {labels: {env: prod, tier: a}}\n"
        "db5: {labels: {env: test, site: berlin}}\n",
    )
    none, several = problems(path)
    assert none[:3] == ("a.yaml", 1, "db2.policy")
    assert none[3].startswith("is missing: The policy that it follows")
    assert several[:3] == ("a.yaml", 2, "db3")
    assert several[3] == (
        "its labels match several entries of policies_by_label: `gold` (line 2) and `bronze` (line 4): "
        "name its `policy` here"
    )


def test_rules_that_make_no_sense_are_told_and_name_policies_that_exist(tmp_path: Path) -> None:
    text = """\
policies_by_label:
  - {labels: {}, policy: gold}
  - {policy: gold}
  - {labels: {env: 1}, policy: gold}
  - {labels: {env: prod}, policy: golf}
"""
    path = write(tmp_path, text + CONFIGURATION.replace("{policy: gold}", "{labels: {env: prod}}"))
    found = problems(path)
    assert [one[1:3] for one in found] == [
        (2, "policies_by_label[0].labels"),
        (3, "policies_by_label[1].labels"),
        (4, "policies_by_label[2].labels.env"),
        (5, "policies_by_label[3].policy"),
    ]
    assert found[3][3] == "no policy `golf` in the folder of policies; did you mean `gold`?"
    text = "policies_by_label:\n  - {labels: {env: prod}, policy: golf}\n"
    path = write(tmp_path, text + CONFIGURATION)
    assert problems(path) == [], "no server follows it"
    assert [one.message for one in load(path).broken["golf"]] == [found[3][3]]


def test_hostile_labels_are_refused(tmp_path: Path) -> None:
    labels = "{a=b: c, ok: 'x y', '': x, env: [prod], deep: {a: b}, n: 1}"
    path = write(tmp_path, CONFIGURATION.replace("{policy: gold}", f"{{policy: gold, labels: {labels}}}"))
    assert [one[2] for one in problems(path)] == [
        "servers.db1.labels.a=b",
        "servers.db1.labels.ok",
        "servers.db1.labels.",
        "servers.db1.labels.env",
        "servers.db1.labels.deep",
        "servers.db1.labels.n",
    ]
    many = ", ".join(f"l{n}: x" for n in range(65))
    path = write(tmp_path, CONFIGURATION.replace("{policy: gold}", f"{{policy: gold, labels: {{{many}}}}}"))
    assert [one[2] for one in problems(path)] == ["servers.db1.labels"]
