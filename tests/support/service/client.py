"""A client of a whole service: streamed requests, node counters, and the check that everything is released."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from support.service.service import Service

HEARTBEAT_S = 0.1


@dataclass(slots=True)
class Exchange:
    """One streamed ``/generate`` request and its response so far.

    Attributes:
        began_at, ended_at: instants by ``time.monotonic``; ``ended_at`` is 0 until the end.
        status: the HTTP status; 0 until the response begins.
        reads: instants at which bytes arrived.
        arrivals: instant of each output token.
        body: the last event.
        is_broken: the connection closed before the end of the response.
    """

    began_at: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    reads: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    is_broken: bool = False
    ended_at: float = 0.0
    work: "asyncio.Task[None] | None" = None

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.body.get("output_ids", ()))

    @property
    def code(self) -> str:
        """The error code; empty without an error."""
        return "" if self.error is None else str(self.error["code"])

    async def has(self, num_tokens: int, timeout_s: float = 180.0) -> None:
        """Wait until ``num_tokens`` tokens have arrived."""
        await until(lambda: len(self.arrivals) >= num_tokens or bool(self.ended_at), timeout_s, "no tokens arrived")
        assert len(self.arrivals) >= num_tokens, f"ended with {self.status} {self.error}"

    async def end(self, timeout_s: float = 300.0) -> "Exchange":
        """Wait until the response has ended."""
        assert self.work is not None
        await asyncio.wait_for(self.work, timeout_s)
        return self

    async def goes_on(self, num_tokens: int = 50) -> None:
        """Wait until this many more tokens have arrived, or the last one, and close the connection."""
        goal = len(self.arrivals) + num_tokens
        await until(lambda: len(self.arrivals) >= goal or bool(self.ended_at), 180.0, "no tokens arrived")
        assert (self.status, self.error, self.is_broken) == (200, None, False)
        await self.leave()

    async def leave(self) -> None:
        """Close the connection before the response has ended."""
        assert self.work is not None
        self.work.cancel()
        await asyncio.gather(self.work, return_exceptions=True)


class Client:
    """An HTTP client of a service; ``session`` serves requests that have no method here."""

    def __init__(self, service: "Service", session: aiohttp.ClientSession) -> None:
        self.service = service
        self.session = session
        self._exchanges: list[Exchange] = []

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Return status and decoded JSON."""
        async with self.session.post(path, json=body) as answer:
            return answer.status, await answer.json()

    async def generate(self, prompt: Sequence[int] | str, max_new: int = 8, **options: Any) -> dict[str, Any]:
        """Return the response of ``/generate``; greedy and without stopping at EOS, unless ``options`` override it."""
        status, answer = await self.post("/generate", body_of(prompt, max_new, **options))
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def begin(self, prompt: Sequence[int] | str, max_new: int = 8, **options: Any) -> Exchange:
        """Start a streamed ``/generate``."""
        exchange = Exchange(time.monotonic())
        body = {**body_of(prompt, max_new, **options), "stream": True}
        exchange.work = asyncio.create_task(self._follow(exchange, body))
        self._exchanges.append(exchange)
        return exchange

    def forget(self, exchange: Exchange) -> None:
        """Drop a finished exchange, so that a long test does not keep all of them."""
        self._exchanges.remove(exchange)

    async def leave_all(self) -> None:
        """Close all requests in flight."""
        await asyncio.gather(*(exchange.leave() for exchange in self._exchanges))

    async def _follow(self, exchange: Exchange, body: dict[str, Any]) -> None:
        try:
            async with self.session.post("/generate", json=body) as answer:
                exchange.status, exchange.headers = answer.status, dict(answer.headers)
                if answer.status != 200:
                    exchange.error = (await answer.json())["error"]
                    return
                rest = b""
                is_done = False
                while data := await answer.content.readany():
                    exchange.reads.append(time.monotonic())
                    *events, rest = (rest + data).split(b"\n\n")
                    for event in events:
                        is_done |= _take(exchange, event)
                exchange.is_broken = not is_done and exchange.error is None
        except (aiohttp.ClientError, ConnectionError):
            exchange.is_broken = True
        finally:
            exchange.ended_at = time.monotonic()

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Rows of ``/v1/workers`` by name."""
        async with self.session.get("/v1/workers") as answer:
            return {worker["name"]: worker for worker in (await answer.json())["workers"]}

    async def fresh(self, timeout_s: float = 120.0) -> dict[str, dict[str, Any]]:
        """Return the rows of ``/v1/workers`` once every running node has sent a heartbeat after this call."""
        began = time.monotonic()
        rows: dict[str, dict[str, Any]] = {}
        while True:
            asked = time.monotonic()
            for name, row in (await self.workers()).items():
                if row["heartbeat"] is not None and asked - row["seen_s_ago"] > began:
                    rows[name] = row
            if rows.keys() >= set(self.service.running_nodes):
                return rows
            assert time.monotonic() - began < timeout_s, f"heartbeats only from {sorted(rows)}\n{self.service.log()}"
            await asyncio.sleep(HEARTBEAT_S / 2)

    async def heartbeats(self) -> dict[str, dict[str, Any]]:
        return {name: row["heartbeat"] for name, row in (await self.fresh()).items()}

    async def counters(self) -> dict[str, dict[str, float]]:
        """Return the counters of every node since its start."""
        return {name: heartbeat["counters"] for name, heartbeat in (await self.heartbeats()).items()}

    async def settled(self, timeout_s: float = 25.0) -> dict[str, dict[str, float]]:
        """Wait until every page, slot and count is released; return the counters of the nodes.

        Args:
            timeout_s: how long nothing more may be released. It is shorter than every lease of a transfer (30 s at
                least), so that no lease hides a leak.
        """
        before: dict[str, str] = {}
        ends = 0.0
        while True:
            rows = await self.fresh()
            left = {name: what for name, row in rows.items() if (what := _held(row))}
            if not left:
                break
            if left != before:
                before, ends = left, time.monotonic() + timeout_s
            assert time.monotonic() < ends, f"not released: {left}\n{self.service.log()}"
            await asyncio.sleep(HEARTBEAT_S / 2)
        totals = {name: row["heartbeat"]["counters"] for name, row in rows.items()}
        for name, counters in totals.items():
            assert counters["failed_checks"] == 0, f"{name}\n{self.service.log()}"
        return totals


def body_of(prompt: Sequence[int] | str, max_new: int, **options: Any) -> dict[str, Any]:
    """Return a body for ``/generate``; options that are not fields of the request become sampling parameters."""
    outer = {"rid", "return_logprob", "top_logprobs_num", "deadline_ms", "cache_salt", "priority", "model"}
    sampling = {"temperature": 0, "max_new_tokens": max_new, "ignore_eos": True}
    sampling |= {name: value for name, value in options.items() if name not in outer}
    field_name = "text" if isinstance(prompt, str) else "input_ids"
    given = prompt if isinstance(prompt, str) else list(prompt)
    body = {field_name: given, "sampling_params": sampling}
    return body | {name: value for name, value in options.items() if name in outer}


def _take(exchange: Exchange, event: bytes) -> bool:
    """Record a server-sent event; True if it is the last."""
    if event.startswith(b":"):  # a comment, as on a stream that is silent while nodes are replaced
        return False
    assert event.startswith(b"data: "), event
    if event == b"data: [DONE]":
        return True
    body = json.loads(event[6:])
    if "error" in body:
        exchange.error = body["error"]
        return False
    num_new = len(body["output_ids"]) - len(exchange.arrivals)
    exchange.arrivals += [exchange.reads[-1]] * num_new
    exchange.texts.append(body["text"])
    exchange.body = body
    return False


def _held(row: dict[str, Any]) -> str:
    """Describe what a node still holds; empty if nothing."""
    heartbeat = row["heartbeat"]
    missing = row["register"]["num_pages"] - heartbeat["num_free_pages"] - heartbeat["num_cached_pages"]
    found = {
        "waiting": heartbeat["num_waiting"],
        "running": heartbeat["num_running"],
        "quarantined pages": heartbeat["num_quarantined_pages"],
        "missing pages": missing,
        "load at the gateway": row["load_tokens"],
    }
    return ", ".join(f"{count} {what}" for what, count in found.items() if count)


async def until(is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll a condition every 2 ms until it holds; fail with ``what`` after ``timeout_s``."""
    ends = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < ends, what
        await asyncio.sleep(0.002)


def prompt_of(length: int, seed: int) -> list[int]:
    """Return random token ids; prompts of different seeds share no prefix."""
    drawn = random.Random(seed)
    return [drawn.randrange(4, 1000) for _ in range(length)]
