from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backupd.model.errors import NotFoundError
from policies.lint import not_yet_active
from policies.load import load
from policies.reference import example, example_names, main, policy_schema, reference
from policies.yaml_tree import read_document
from tests.support.catalog.configuration_files import example_configuration, write
from tests.support.policies import load_policy


def test_the_page_in_docs_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == reference(), "run: python -m policies.reference"


def test_the_page_is_written_where_one_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "docs" / "page.md")]) == 0
    assert (tmp_path / "docs" / "page.md").read_text(encoding="utf-8") == reference()
    assert main(["-"]) == 0
    assert capsys.readouterr().out == reference()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "docs/configuration.md" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in example_names() if name != "backupd"])
def test_every_example_of_a_policy_is_valid(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.yaml").write_text(example(name), encoding="utf-8")
    load_policy(tmp_path / "x.yaml")


def test_an_unknown_example_is_named_with_what_there_is() -> None:
    with pytest.raises(NotFoundError, match="did you mean `gold`"):
        example("glod")


def test_the_json_schema_refuses_unknown_names() -> None:
    schema = policy_schema()
    assert schema["additionalProperties"] is False
    assert schema["properties"]["physical"]


def test_the_json_schema_tells_an_editor_about_every_name() -> None:
    schema: dict[str, Any] = policy_schema()
    sections = [schema, *schema["$defs"].values()]
    assert all(section["additionalProperties"] is False for section in sections)
    for section in sections:
        for name, field in section["properties"].items():
            assert field.get("description"), name
            nested = "$ref" in str(field)
            assert nested or field.get("examples"), name
    # Sizes may be numbers, and everything else is written as the examples show it.
    assert schema["$defs"]["Limits"]["properties"]["read"]["anyOf"][0]["type"] == ["string", "integer"]


@pytest.mark.parametrize("name", [name for name in example_names() if name != "backupd"])
def test_every_name_in_an_example_is_in_the_json_schema(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.yaml").write_text(example(name), encoding="utf-8")
    node, _problems = read_document(tmp_path / "x.yaml")
    assert node is not None
    assert set(node.key_lines) <= set(policy_schema()["properties"])


def test_fields_that_are_not_acted_on_yet_are_all_named(tmp_path: Path) -> None:
    text = example("gold").replace("[local], others: [offsite, vault]", "[local, vault], others: [offsite]")
    path = write(tmp_path, example_configuration(tmp_path / "policies"), gold=text, physical=example("physical-only"))
    loaded = load(path)
    assert not_yet_active(loaded.policies["gold"]) == []
    assert not_yet_active(loaded.policies["physical"]) == []
