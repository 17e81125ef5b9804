"""The pages to look at."""

from __future__ import annotations

from api.web import jobpages, listpages, overviewpage, serverpage

ROUTERS = (overviewpage.router, serverpage.router, listpages.router, jobpages.router)
