"""What the server's endpoints take and give, as data: the OpenAPI document and docs/api.md are made of it.

What lives here: `declare.py` (what is said of a parameter and of an endpoint), `generation.py`, `texts.py`,
`stored.py` and `operating.py` (what is said of each), `answers.py` (the shapes of answers), `openapi.py` and `page.py`
(what is made of it; `python -m tailrace.api.reference FILE` writes the page).

Names, types, and what is refused are not said again here: they come from the bodies that requests are decoded into
(`api.schema.Body`), the bounds from `api.params`, keys and methods from the routes of `api.front`. A field that nothing
is said of is an error when this package is imported, which the server does when somebody asks for /openapi.json.
"""

from __future__ import annotations

from tailrace.api.reference.declare import Endpoint
from tailrace.api.reference.generation import GENERATION
from tailrace.api.reference.operating import ADMIN, OPERATING
from tailrace.api.reference.stored import STORED
from tailrace.api.reference.texts import TEXTS

ENDPOINTS: tuple[Endpoint, ...] = (*GENERATION, *TEXTS, *STORED, *OPERATING, *ADMIN)
"""All that the server answers."""

__all__ = ["ENDPOINTS", "Endpoint"]
