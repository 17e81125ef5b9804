"""Destinations and keys: where the backups are, and who opens them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import JSONResponse

from api.auth import Acting, CurrentActor
from api.routes.answers import VIEWER, part, router_of, several
from api.schemas.access import Key
from api.schemas.base import Whole
from api.schemas.servers import Destination

destination_routes = router_of("destinations")


@destination_routes.get("/destinations", dependencies=[VIEWER], response_model=list[Destination])
def list_destinations(
    request: Request, query: Annotated[Whole, Query()], actor: CurrentActor, service: Acting
) -> JSONResponse:
    """Every destination: does it answer, how full is it, what is still to be copied there. Empty for a token that sees
    some servers only."""
    return part(request, service.installation.destinations() if actor.sees("") else (), query)


@destination_routes.get("/keys", dependencies=[VIEWER], response_model=list[Key])
def list_keys(actor: CurrentActor, service: Acting) -> JSONResponse:
    """The keys that open backups: when each was last proved, when it expires, how many backups depend on it. Empty for
    a token that sees some servers only."""
    return several(service.keys.list() if actor.sees("") else ())
