from __future__ import annotations

from pathlib import Path

import pytest

from backupd.model.errors import NotFoundError
from policies.lint import advice, not_yet_active, settings_not_yet_active
from policies.load import load, load_policy
from policies.reference import example, example_names, main, policy_schema, reference
from tests.policies.places import example_configuration, write


def test_the_page_in_docs_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == reference(), "run: python -m policies.reference"


def test_the_page_is_written_where_one_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "docs" / "page.md")]) == 0
    assert (tmp_path / "docs" / "page.md").read_text(encoding="utf-8") == reference()
    assert main(["-"]) == 0
    assert capsys.readouterr().out == reference()


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


def test_missing_legs_are_advised(tmp_path: Path) -> None:
    path = write(tmp_path, example_configuration(tmp_path / "policies"), gold=example("gold"),
                 physical=example("physical-only"), weekly=example("weekly-logical"))
    policies = load(path).policies
    assert advice(policies["gold"]) == []
    assert [line.partition(":")[0] for line in advice(policies["physical"])] == [
        "logical", "binlog", "config_files", "destinations"]
    assert [line.partition(":")[0] for line in advice(policies["weekly"])] == ["physical", "destinations"]


def test_fields_that_are_not_acted_on_yet_are_all_named(tmp_path: Path) -> None:
    text = example("gold").replace("[local], others: [offsite, vault]", "[local, vault], others: [offsite]")
    path = write(tmp_path, example_configuration(tmp_path / "policies"), gold=text, physical=example("physical-only"))
    loaded = load(path)
    assert [line.partition(":")[0] for line in not_yet_active(loaded.policies["gold"], loaded.configuration)] == [
        "physical.full", "physical.incremental", "logical", "binlog", "config_files", "destinations.others",
        "retention", "objectives.rpo", "test_restore.schedule", "test_restore.target", "destinations.required"]
    assert [line.partition(":")[0] for line in not_yet_active(loaded.policies["physical"], loaded.configuration)] == [
        "physical.full"]
    assert [line.partition(":")[0] for line in settings_not_yet_active(loaded.configuration)] == [
        "alerts.email", "api", "destinations.offsite", "destinations.vault"]
