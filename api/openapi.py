"""The reference of the REST interface, /openapi.json: what the routes say, with an example and every problem of each
operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter

from api.schemas.access import ValidationRequest
from api.schemas.base import Problem
from api.schemas.examples import example_of
from api.schemas.restores import Plan, RefusedRestore

_PROBLEMS = {
    401: "The bearer token is missing, expired or revoked.",
    403: "The role does not suffice.",
    404: "The resource does not exist, or the token has no access to it.",
    422: "The request is invalid.",
    429: "Too many wrong tokens; `Retry-After` says how long to wait.",
    502: "A server, a tool or a destination failed.",
    503: "The catalog does not answer.",
}
_PROBLEMS_OF_CHANGES = {
    400: "The body is not text.",
    409: "Conflict: a retention rule, a hold or another running operation prevents the request.",
    413: "The request is too long.",
}
_PROBLEMS_OF_CLUSTERS = {409: "The server is not a node of a cluster, or no node answers."}
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key with the same request gives the same answer again, for a day.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
    "example": "6f1c3a52-6f0e-4a39-9b1c-0a7d4d1f6f10",
}
_KNOWN = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "description": "The `ETag` of the answer before: 304 without a body when it has not changed.",
    "schema": {"type": "string"},
    "example": '"9f86d081884c7d659a2feaa0c55ad015"',
}
_REFERENCE = "#/components/schemas/"
_OWN = (Problem, Plan, RefusedRestore, ValidationRequest)
"""Shapes that no route names as its answer or its body."""


def describe(app: FastAPI) -> None:
    """Let ``app`` describe its routes in this way; it is made when it is asked for first."""

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]  # FastAPI's documented way of changing it


def _described(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for shape in _OWN:
        made = TypeAdapter(shape).json_schema(ref_template=_REFERENCE + "{model}")
        for name, definition in {**made.pop("$defs", {}), shape.__name__: made}.items():
            schemas.setdefault(name, definition)
    for shape_name, found in _shown():
        if shape_name in schemas:
            schemas[shape_name]["examples"] = found
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for path, method, operation in operations(document):
        _add_problems(path, method, operation)
        _add_examples(operation, schemas)
        if path.startswith("/v1/"):
            operation.setdefault("parameters", []).extend(
                [_KEY] if method == "post" else [_KNOWN] if method == "get" else []
            )
    return document


def operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, method in small letters, and operation."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def methods_at(app: FastAPI, path: str) -> tuple[str, ...]:
    """What is done there, of all routes of that path."""
    routes = [route for router in app.state.routers for route in router.routes if isinstance(route, APIRoute)]
    found = [route for route in routes if route.path == path] or [
        route for route in routes if route.path_regex.match(path)
    ]
    return tuple(sorted({method for route in found for method in route.methods or ()}))


def _add_problems(path: str, method: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    if not path.startswith("/v1/"):
        responses.pop("422", None)
        return
    problems = dict(_PROBLEMS) if method == "get" else {**_PROBLEMS, **_PROBLEMS_OF_CHANGES}
    if path.startswith("/v1/clusters/"):
        problems |= _PROBLEMS_OF_CLUSTERS
    for status, description in sorted(problems.items()):
        shape = RefusedRestore if (path, method, status) == ("/v1/restores", "post", 409) else Problem
        responses[str(status)] = {
            "description": description,
            "content": {"application/problem+json": {"schema": {"$ref": _REFERENCE + shape.__name__}}},
        }
    if method == "get":
        responses["304"] = {"description": "Not modified since the `ETag` given in `If-None-Match`."}


def _add_examples(operation: dict[str, Any], schemas: Mapping[str, Any]) -> None:
    """Those of the shapes, to bodies and answers."""
    contents = [response.get("content", {}) for response in operation["responses"].values()]
    body = operation.get("requestBody", {}).get("content", {})
    for content in (*contents, body):
        for media in content.values():
            found = list(_examples(media.get("schema", {}), schemas))
            if not found or "example" in media:
                continue
            if content is body:
                media["examples"] = {str(number): {"value": value} for number, value in enumerate(found, 1)}
            else:
                media["example"] = found[0]


def _shown(base: type[BaseModel] = BaseModel) -> Iterator[tuple[str, list[Any]]]:
    """The examples of every shape as they were written: on its way through FastAPI whatever is null gets lost."""
    for shape in base.__subclasses__():
        extra = shape.model_config.get("json_schema_extra")
        if shape.__module__.startswith("api.schemas.") and isinstance(extra, dict) and "examples" in extra:
            examples = extra["examples"]
            yield shape.__name__, examples if isinstance(examples, list) else [examples]
        yield from _shown(shape)


def _examples(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[Any]:
    """Those that a shape declares; of an answer that declares none one is made."""
    if "$ref" in schema:
        shape = schemas[schema["$ref"].removeprefix(_REFERENCE)]
        if shape.get("type") == "object":
            shape.setdefault("examples", [example_of(schema, schemas)])
        yield from shape.get("examples", ())
    elif schema.get("type") == "array":
        for value in _examples(schema["items"], schemas):
            yield [value]
            return
    else:
        for choice in (*schema.get("oneOf", ()), *schema.get("anyOf", ())):
            yield from _examples(choice, schemas)
