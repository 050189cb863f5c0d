"""A JSON response, encoded by msgspec; generated answers are written by ``gateway.http.streaming``."""

from typing import Any

from starlette.responses import JSONResponse

from gateway.http.formatters.common import encode_json


class JsonResponse(JSONResponse):
    def render(self, content: Any) -> bytes:
        return encode_json(content)
