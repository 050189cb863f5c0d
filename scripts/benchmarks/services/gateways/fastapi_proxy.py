"""A plain proxy as many deployments have it: FastAPI on uvicorn in front, an aiohttp client behind.

Run with its port and the URL of the worker as arguments.
"""

import contextlib
import sys
from collections.abc import AsyncIterator

import aiohttp
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse


def make_app(worker: str) -> FastAPI:
    sessions: list[aiohttp.ClientSession] = []

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            sessions.append(session)
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.post("/v1/{path:path}")
    async def forward(path: str, request: Request) -> Response:
        answer = await sessions[0].post(f"{worker}/v1/{path}", data=await request.body())
        kind = answer.headers["Content-Type"]
        if kind.startswith("text/event-stream"):
            return StreamingResponse(answer.content.iter_any(), answer.status, media_type=kind)
        return Response(await answer.read(), answer.status, media_type=kind)

    return app


if __name__ == "__main__":
    app = make_app(sys.argv[2])
    uvicorn.run(app, port=int(sys.argv[1]), loop="uvloop", http="httptools", log_level="error", access_log=False)
