"""Small JSON bodies and query values, in and out of the ordinary endpoints."""

from __future__ import annotations

from math import isnan, nan
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kvsteward.errors import ProtocolError
from kvsteward.wire.chat import parse_object

MAX_SMALL_BODY = 1 * 2**20


def json(payload: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(payload), status, media_type="application/json")


async def body_of(request: Request) -> dict[str, Any]:
    """The object in a request's body; an empty body is an empty object. Raises ProtocolError."""
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_SMALL_BODY:
            raise ProtocolError(f"the body is larger than {MAX_SMALL_BODY} bytes")
    return parse_object(raw) if raw.strip() else {}


def number_of(request: Request, name: str, default: float) -> float:
    """A number of the query. Raises ProtocolError for what is none."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = nan
    if isnan(number):
        raise ProtocolError(f"'{name}' must be a number, not '{text}'", param=name)
    return number


def whole_of(request: Request, name: str, default: int, least: int, most: int) -> int:
    """A number of the query as the nearest whole one from `least` to `most`. Raises ProtocolError for what is none."""
    return int(max(least, min(number_of(request, name, default), most)))
