"""What a service hands on is what it has read, and costs a process only what it asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from backupd.model.errors import ConfigurationError
from policies import handed
from policies.document import Model
from policies.fields import Section
from policies.handed import HandedServers, prepare, revived, sections
from policies.load import load
from tests.support.catalog.configuration_files import CONFIGURATION, POLICY, example_configuration, write
from tests.unit.policies.test_servers import BY_LABEL, add


def test_handed_on_is_the_same_again(tmp_path: Path) -> None:
    text = BY_LABEL + CONFIGURATION.replace("{policy: gold}", "{labels: {env: prod}, socket: x.sock}")
    path = write(tmp_path, text, gold=POLICY, bronze=POLICY, broken="physical: 1\n")
    add(tmp_path, a="db2: {policy: bronze, socket: y.sock}\n")
    loaded = load(path)
    again = revived(json.loads(json.dumps(loaded.document)))
    assert again.configuration == loaded.configuration
    assert list(again.configuration.servers) == ["db1", "db2"]
    assert again.configuration.servers["db1"].policy == "gold"
    assert again.configuration.servers["db2"].socket == tmp_path / "servers.d" / "y.sock"
    assert (again.policies, again.broken, again.files) == (loaded.policies, loaded.broken, loaded.files)
    assert again.broken


def test_a_process_makes_the_server_that_it_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    add(tmp_path, a="".join(f"s{n}: {{policy: gold}}\n" for n in range(100)))
    again = revived(load(path).document)
    made: list[type] = []
    really = handed._revived

    def counted(model: type[Model], plain: object, file: Path) -> Model:
        made.append(model)
        return really(model, plain, file)

    monkeypatch.setattr(handed, "_revived", counted)
    servers = again.configuration.servers
    assert "s7" in servers
    assert "s700" not in servers
    assert len(servers) == 101
    assert isinstance(servers, HandedServers)
    assert servers.policy("s9") == "gold"
    assert made == []
    assert servers["s7"].policy == "gold"
    assert servers.get("s7") is servers["s7"]
    assert len(made) == 1


def test_what_is_prepared_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = load(write(tmp_path, example_configuration(tmp_path / "policies"))).document
    prepare()
    built: list[type[BaseModel]] = []
    monkeypatch.setattr(BaseModel, "model_rebuild", classmethod(lambda model, **_: built.append(model)))
    assert revived(document).configuration.servers["shop-db1"].policy == "gold"
    assert [model for model in built if issubclass(model, Section)] == []
    assert all(kind.__pydantic_complete__ for kind in sections(Section))


def test_what_another_version_handed_on_is_read_or_refused(tmp_path: Path) -> None:
    document = json.loads(json.dumps(load(write(tmp_path)).document))
    (_file, servers) = document["servers"][0]
    servers["db1"]["later"] = 1
    again = revived(document)
    with pytest.raises(ConfigurationError, match="was it upgraded"):
        again.configuration.servers["db1"]
    earlier = {**document, "configuration": {**document["configuration"], "servers": {"db1": {"policy": "gold"}}}}
    del earlier["servers"]
    assert list(revived(earlier).configuration.servers) == ["db1"]
