"""A collector of OpenTelemetry spans for tests, built on the official protobufs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class ReceivedSpan:
    """Attributes:
    service, instance: ``service.name`` and ``service.instance.id`` of the resource.
    start_ns, end_ns: since 1970.
    """

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]


@dataclass
class Collector:
    """Attributes:
    status: of its answers.
    num_bytes: received in all.
    """

    url: str = ""
    status: int = 200
    num_bytes: int = 0
    spans: list[ReceivedSpan] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[Sequence[ReceivedSpan]], Any]) -> list[ReceivedSpan]:
        """Wait until the spans meet a condition; return all of them."""
        async with asyncio.timeout(60):
            while not condition(self.spans):
                self._changed.clear()
                await self._changed.wait()
        return self.spans

    async def on_post(self, request: web.Request) -> web.Response:
        body = await request.read()
        assert request.content_type == "application/x-protobuf"
        self.num_bytes += len(body)
        if self.status == 200:
            self.spans += _spans(ExportTraceServiceRequest.FromString(body))
        self._changed.set()
        answer = ExportTraceServiceResponse().SerializeToString()
        return web.Response(status=self.status, body=answer, content_type="application/x-protobuf")


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    collected = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collected.on_post)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collected.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collected
    finally:
        await runner.cleanup()


def _spans(message: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    found = []
    for resource_spans in message.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            assert scope_spans.scope.name == "baton"
            for span in scope_spans.spans:
                found.append(
                    ReceivedSpan(
                        span.name, resource["service.name"], resource["service.instance.id"], span.trace_id.hex(),
                        span.span_id.hex(), span.parent_span_id.hex(), span.kind, span.start_time_unix_nano,
                        span.end_time_unix_nano, span.status.code == 2, _attributes(span.attributes),
                    )
                )  # fmt: skip
    return found


def _attributes(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
