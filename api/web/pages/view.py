"""The pages to look at."""

from __future__ import annotations

from api.web.pages import jobs as jobpages
from api.web.pages import lists as listpages
from api.web.pages import overview as overviewpage
from api.web.pages import server as serverpage

ROUTERS = (overviewpage.router, serverpage.router, listpages.router, jobpages.router)
