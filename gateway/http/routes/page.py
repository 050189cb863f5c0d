"""The pages at ``/`` and ``/docs`` and their files, which are open. The data of ``/`` needs a key if there are any."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from common.errors import ErrorCode, RequestError
from gateway.http.access.request_checks import STATIC, RequestChecks
from gateway.http.services import Services

FOLDER = Path(__file__).parents[1] / "static"
INDEX, DOCS = "index.html", "docs.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
#: Scripts and styles come from this server alone, none stand in the document, and the page talks to no other server.
SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    headers: dict[str, str]

    def respond(self, known_tag: str) -> Response:
        """The file, or 304 if the browser has it already."""
        if self.headers["etag"] in known_tag:
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers)


def read_files(folder: Path) -> dict[str, StaticFile]:
    """All files of the pages by name, read once, so that no path of a request ever reaches the file system."""
    return {path.name: _read(path) for path in sorted(folder.iterdir()) if path.suffix in TYPES}


def _read(path: Path) -> StaticFile:
    body = path.read_bytes()
    headers = {
        "content-type": f"{TYPES[path.suffix]}; charset=utf-8",
        "etag": f'"{hashlib.sha256(body).hexdigest()[:16]}"',
        "cache-control": "no-cache",  # ask each time, by the tag: an update shows at once
        "content-security-policy": SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return StaticFile(body, headers)


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter()
    files = read_files(FOLDER)

    @router.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return files[INDEX].respond(request.headers.get("if-none-match", ""))

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return files[DOCS].respond(request.headers.get("if-none-match", ""))

    @router.get(STATIC + "{name}", include_in_schema=False)
    async def static_file(name: str, request: Request) -> Response:
        if name not in files:
            raise RequestError(ErrorCode.NOT_FOUND, "this path does not exist")
        return files[name].respond(request.headers.get("if-none-match", ""))

    return router
