"""The page at `/`: static files and their headers.

It knows nothing of sessions or engines: the page reads the same public API as any client. The plotly script is the
installed package's own file. Invariant: only the files named here are served, each under a policy that lets the page
load nothing from elsewhere and run no script that is not a file of ours.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

PLOTLY = "plotly.min.js"
CONTENT_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    PLOTLY: "text/javascript; charset=utf-8",
}
_STYLE_OF_PLOTLY = re.compile(
    rb"""createElement\("style"\);(\w+)\.id="[0-9a-f]+",\1\.textContent='((?:[^'\\]|\\.)*)'"""
)
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, as it is and compressed. `digest` is of the plain bytes."""

    plain: bytes
    packed: bytes
    digest: str
    content_type: str


def source(name: str) -> Traversable:
    """Where a file of the page lies: beside this module, or in the plotly package."""
    if name == PLOTLY:
        return files("plotly") / "package_data" / PLOTLY
    return files("kvsteward.gateway.dashboard") / name


def load(name: str) -> Asset:
    """Reads and compresses a file. Blocks."""
    plain = source(name).read_bytes()
    digest = hashlib.sha256(plain).hexdigest()[:32]
    return Asset(plain, gzip.compress(plain, 6, mtime=0), digest, CONTENT_TYPES[name])


def policy(plotly: bytes) -> str:
    """The Content-Security-Policy of the page.

    plotly needs two allowances: it writes style attributes on the SVG text that it draws, and, as it is loaded, adds
    one style element for its maps. Of style elements only that one is let in, by its hash."""
    found = _STYLE_OF_PLOTLY.search(plotly)
    style = "'self'"
    if found:
        text = re.sub(rb"\\(.)", rb"\1", found[2])
        style += f" 'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
    return (
        f"default-src 'none'; script-src 'self'; style-src {style}; style-src-attr 'unsafe-inline'; img-src 'self'; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    )


def respond(request: Request, asset: Asset, csp: str) -> Response:
    """The file, or 304 where the browser has it already."""
    packed = "gzip" in request.headers.get("accept-encoding", "")
    etag = f'"{asset.digest}{"-gzip" if packed else ""}"'
    headers = {**HEADERS, "content-security-policy": csp, "etag": etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if etag in known:
        return Response(status_code=304, headers=headers)
    if packed:
        headers["content-encoding"] = "gzip"
    return Response(asset.packed if packed else asset.plain, headers=headers, media_type=asset.content_type)


def load_all() -> tuple[dict[str, Asset], str]:
    """All files and their policy. Blocks."""
    assets = {name: load(name) for name in CONTENT_TYPES}
    return assets, policy(assets[PLOTLY].plain)


def routes() -> list[BaseRoute]:
    """`/` and `/static/NAME`. Files are read when the first is asked for, and kept."""
    loaded: tuple[dict[str, Asset], str] | None = None

    async def serve(request: Request) -> Response:
        nonlocal loaded
        name = request.path_params.get("name", "index.html")
        if name not in CONTENT_TYPES:
            raise HTTPException(404, "Not Found")
        if loaded is None:
            loaded = await asyncio.to_thread(load_all)
        assets, csp = loaded
        return respond(request, assets[name], csp)

    return [Route("/", serve), Route("/static/{name}", serve)]
