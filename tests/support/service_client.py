"""A client of a whole service: requests under way, what nodes tell of themselves, the proof that all is released."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from support.service import Service

HEARTBEAT_S = 0.1


@dataclass(slots=True)
class Exchange:
    """One streamed ``/generate`` under way, or over.

    Attributes:
        began_at, ended_at: instants by ``time.monotonic``; 0 as long as it has not come.
        status: of HTTP; 0 before it is there, and for good if the connection broke first.
        reads: instants at which bytes arrived.
        arrivals: instant of each output token.
        body: the last event, or the whole answer if it was an error.
        is_broken: the connection ended before the answer did.
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
        """Of the error; empty without one."""
        return "" if self.error is None else str(self.error["code"])

    async def has(self, num_tokens: int, timeout_s: float = 20.0) -> None:
        """Waits for so many tokens."""
        await until(lambda: len(self.arrivals) >= num_tokens or bool(self.ended_at), timeout_s, "no tokens")
        assert len(self.arrivals) >= num_tokens, f"ended with {self.status} {self.error}"

    async def end(self, timeout_s: float = 30.0) -> "Exchange":
        """Waits for its end."""
        assert self.work is not None
        await asyncio.wait_for(self.work, timeout_s)
        return self

    async def leave(self) -> None:
        """Go away, as a client whose user has closed the window."""
        assert self.work is not None
        self.work.cancel()
        await asyncio.gather(self.work, return_exceptions=True)


class Client:
    """One user of a service; ``session`` is aiohttp's, for everything that has no method here."""

    def __init__(self, service: "Service", session: aiohttp.ClientSession) -> None:
        self.service = service
        self.session = session
        self._exchanges: list[Exchange] = []

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and decoded answer."""
        async with self.session.post(path, json=body) as answer:
            return answer.status, await answer.json()

    async def generate(self, prompt: Sequence[int] | str, max_new: int = 8, **options: Any) -> dict[str, Any]:
        """The answer of ``/generate``, greedy and of full length unless ``options`` say otherwise."""
        status, answer = await self.post("/generate", body_of(prompt, max_new, **options))
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def begin(self, prompt: Sequence[int] | str, max_new: int = 8, **options: Any) -> Exchange:
        """Starts a streamed ``/generate``."""
        exchange = Exchange(time.monotonic())
        body = {**body_of(prompt, max_new, **options), "stream": True}
        exchange.work = asyncio.create_task(self._follow(exchange, body))
        self._exchanges.append(exchange)
        return exchange

    def forget(self, exchange: Exchange) -> None:
        """It is over, and of no more interest."""
        self._exchanges.remove(exchange)

    async def leave_all(self) -> None:
        """Go away from whatever is still under way."""
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

    async def fresh(self, timeout_s: float = 20.0) -> dict[str, dict[str, Any]]:
        """Rows of which each tells of a moment after this call: of all nodes that should run and are not paused."""
        began = time.monotonic()
        rows: dict[str, dict[str, Any]] = {}
        while True:
            asked = time.monotonic()
            for name, row in (await self.workers()).items():
                if row["heartbeat"] is not None and asked - row["seen_s_ago"] > began:
                    rows[name] = row
            if rows.keys() >= self.service.processes.keys() - {"gateway"}:
                return rows
            assert time.monotonic() - began < timeout_s, f"no heartbeats; only {sorted(rows)}\n{self.service.log()}"
            await asyncio.sleep(HEARTBEAT_S / 2)

    async def heartbeats(self) -> dict[str, dict[str, Any]]:
        return {name: row["heartbeat"] for name, row in (await self.fresh()).items()}

    async def counters(self) -> dict[str, dict[str, float]]:
        """Totals of every node since its start."""
        return {name: heartbeat["counters"] for name, heartbeat in (await self.heartbeats()).items()}

    async def settled(self, timeout_s: float = 9.0) -> dict[str, dict[str, float]]:
        """Waits until all is released, sooner than by any lease, and proves that it is; returns the nodes' totals."""
        ends = time.monotonic() + timeout_s
        while True:
            rows = await self.fresh()
            left = {name: what for name, row in rows.items() if (what := _held(row))}
            if not left:
                break
            assert time.monotonic() < ends, f"not released: {left}\n{self.service.log()}"
            await asyncio.sleep(HEARTBEAT_S / 2)
        totals = {name: row["heartbeat"]["counters"] for name, row in rows.items()}
        for name, counters in totals.items():
            assert counters["failed_checks"] == 0, f"{name}\n{self.service.log()}"
        return totals


def body_of(prompt: Sequence[int] | str, max_new: int, **options: Any) -> dict[str, Any]:
    """A body for ``/generate``; ``options`` of the request itself are told from those of sampling by name."""
    outer = {"rid", "return_logprob", "top_logprobs_num", "deadline_ms", "cache_salt", "priority"}
    sampling = {"temperature": 0, "max_new_tokens": max_new, "ignore_eos": True}
    sampling |= {name: value for name, value in options.items() if name not in outer}
    field_name = "text" if isinstance(prompt, str) else "input_ids"
    given = prompt if isinstance(prompt, str) else list(prompt)
    body = {field_name: given, "sampling_params": sampling}
    return body | {name: value for name, value in options.items() if name in outer}


def _take(exchange: Exchange, event: bytes) -> bool:
    """One server-sent event; True if it was the last."""
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
    """What a node has not given back, in words; empty if nothing."""
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
    """Waits for a condition, looking every few milliseconds."""
    ends = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < ends, what
        await asyncio.sleep(0.002)


def prompt_of(length: int, seed: int) -> list[int]:
    """Token ids that share no prefix with those of another seed."""
    drawn = random.Random(seed)
    return [drawn.randrange(4, 1000) for _ in range(length)]
