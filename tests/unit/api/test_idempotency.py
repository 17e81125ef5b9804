"""A POST that is sent again is done once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx

from backupd.model.access import Role
from tests.support.service.rig import Rig

TOKENS, WORK = "/v1/tokens", "/v1/verifications"


def _post(client: httpx.Client, key: str, path: str = WORK, **body: object) -> httpx.Response:
    return client.post(path, json=body or {"server": "db1"}, headers={"Idempotency-Key": key})


def test_the_same_request_with_the_same_key_gives_the_same_answer_and_is_done_once(house: Rig) -> None:
    client = house.client(Role.OPERATOR)
    before = len(house.catalog.jobs.list())
    first, again = _post(client, "one"), _post(client, "one")
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.content == again.content
    assert first.headers["location"] == again.headers["location"]
    assert "idempotency-replayed" in again.headers
    assert len(house.catalog.jobs.list()) == before + 1


def test_of_many_at_once_one_is_done_and_the_others_are_told(house: Rig) -> None:
    clients = [house.client(Role.OPERATOR) for _ in range(6)]
    before = len(house.catalog.jobs.list())
    with ThreadPoolExecutor(6) as pool:
        statuses = list(pool.map(lambda client: _post(client, "many").status_code, clients))
    assert set(statuses) <= {202, 409}
    assert 202 in statuses
    assert len(house.catalog.jobs.list()) == before + 1


def test_a_key_of_another_request_is_refused(house: Rig) -> None:
    client = house.client(Role.OPERATOR)
    _post(client, "two")
    assert _post(client, "two", server="db1", subset=0.5).status_code == 422
    assert _post(client, "two", path="/v1/replications", server="db1").status_code == 422


def test_keys_of_two_tokens_are_two_keys(house: Rig) -> None:
    one, other = house.client(Role.OPERATOR), house.client(Role.ADMIN)
    assert _post(one, "three").headers["location"] != _post(other, "three").headers["location"]


def test_what_was_refused_may_be_tried_again_with_its_key(house: Rig) -> None:
    client = house.client(Role.OPERATOR)
    assert _post(client, "four", server="nowhere").status_code == 404
    assert _post(client, "four").status_code == 202


def test_a_key_that_is_none_is_refused(house: Rig) -> None:
    client = house.client(Role.OPERATOR)
    for key in ("", "x" * 256):
        assert _post(client, key).status_code == 422


def test_the_secret_of_a_token_is_told_once_and_kept_nowhere(house: Rig) -> None:
    client = house.client(Role.ADMIN)
    first = _post(client, "five", TOKENS, name="new", role="viewer")
    assert first.status_code == 201
    again = _post(client, "five", TOKENS, name="new", role="viewer")
    assert again.status_code == 409
    assert "secret" in again.json()["message"]
    secret = first.json()["token"].encode()
    for file in house.settings.file.parent.rglob("*"):
        assert not file.is_file() or secret not in file.read_bytes()
