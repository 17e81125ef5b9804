"""What a test restore says when it does not come to its end, and restores beside destinations that are gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.restores import test_restore as proving
from backupd.app.restores.plan import plan
from backupd.app.service.dispatch import of_proof
from backupd.catalog.session import open_catalog
from backupd.model.errors import (
    BackupdError,
    DamagedError,
    DestinationError,
    KeyUnusableError,
    NotFoundError,
    RefusedError,
    ToolError,
)
from backupd.model.job import silent
from tests.support.catalog.installation import SERVER, Installation


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        yield Installation(tmp_path, catalog, destinations=("local", "offsite"))


@pytest.fixture
def able(installation: Installation) -> Installation:
    """One that has the means to restore, as far as its configuration says."""
    file = installation.base / "backupd.yaml"
    scratch = installation.base / "scratch"
    file.write_text(file.read_text() + f"restore: {{gnupg_home: {installation.base}, scratch: {{path: {scratch}}}}}\n")
    installation.wiring = Wiring(load_settings(file), installation.catalog, installation.clock)
    return installation


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (DamagedError("a chain is not whole", ["local: objects/ab/x"]), "failed"),
        (KeyUnusableError("no secret key"), "undecided"),
        (RefusedError("scratch is too small"), "undecided"),
        (ToolError("prepare was killed"), "undecided"),
        (DestinationError("not mounted"), "undecided"),
    ],
)
def test_only_what_is_found_out_about_the_data_is_a_verdict(
    able: Installation, monkeypatch: pytest.MonkeyPatch, error: BackupdError, outcome: str
) -> None:
    name = able.add(1, days=1)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(proving, "require_keys", fail)
    proof = proving.test_restore(able.wiring, SERVER, "latest", silent)
    assert (proof.outcome, proof.is_good, proof.backup_id) == (outcome, False, name)
    assert error.message in proof.error
    problem = of_proof(proof).problem
    assert problem is not None
    assert ("the state of the backup is unknown" in problem.message) == (outcome == "undecided")


def test_a_destination_that_is_not_configured_any_more_is_left_out_with_a_warning(installation: Installation) -> None:
    name = installation.add(1, days=2)
    lost = installation.add(2, days=1, destinations=["offsite"])
    installation.destinations = ("local",)
    installation.write("")
    found = plan(installation.wiring, SERVER, "latest", None)
    assert (found.backup_id, found.destinations) == (name, ("local",))
    assert any("offsite is no longer configured" in text for text in found.warnings)
    with pytest.raises(NotFoundError) as refused:
        plan(installation.wiring, SERVER, f"backup:{lost}", None)
    assert "offsite is no longer configured" in refused.value.detail
