"""Small services in virtual time, whose engines produce wrong tokens from wrong pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from support.cluster.fake_engine import VOCAB_SIZE, FakeExecutor, expected_output

from common.config.gateway import GatewayConfig
from common.config.node import NodeConfig
from common.errors import RequestError
from common.node.loading.memory_plan import Capacity
from common.sampling_params import SamplingParams
from gateway.requests.input.generate_request import GenerateRequest
from gateway.workers.pool import make_pool
from scripts.simulator.costs import Costs
from scripts.simulator.service.cluster import Cluster
from scripts.simulator.service.gateway import Answer
from scripts.simulator.service.node import MODEL, Engine, NodeSettings

#: A step takes 10 ms, and 1 ms for each prompt token or row; a message 1 ms; pages of 32 bytes 1 ms each.
COSTS = Costs(0.01, 0.001, 0.001, 0.0, 0.001, 0.001, 32_000.0)


@dataclass(frozen=True)
class NodeLimits:
    """Limits of the nodes, for both roles except the pools.

    Attributes:
        prefill_running: prompts that a prefill node runs at once; ``max_running`` by default.
    """

    prefill_pages: int = 64
    decode_pages: int = 64
    page_size: int = 4
    chunk_tokens: int | None = 16
    max_running: int = 4
    max_queued: int = 1_000
    prefill_running: int | None = None


class SimulatedService:
    """A cluster of ``FakeExecutor``s with its requests and answers.

    Args:
        options: of nodes and gateway, passed to those that have them.
    """

    def __init__(
        self,
        num_prefill: int = 1,
        num_decode: int = 1,
        *,
        limits: NodeLimits | None = None,
        costs: Costs = COSTS,
        engine: Callable[[Capacity], Engine] | None = None,
        **options: Any,
    ) -> None:
        limits = limits or NodeLimits()
        shared = {"max_prefill_tokens": 16_384, **options}
        node = {name: value for name, value in shared.items() if hasattr(NodeConfig, name)}
        gateway = {name: value for name, value in shared.items() if hasattr(GatewayConfig, name)}
        config = NodeConfig(**{"page_size": limits.page_size, **node})
        rest = (limits.max_queued, limits.chunk_tokens)
        settings = NodeSettings(
            config,
            {
                "prefill": Capacity(limits.prefill_running or limits.max_running, limits.prefill_pages, *rest),
                "decode": Capacity(limits.max_running, limits.decode_pages, *rest),
            },
            engine or (lambda given: FakeExecutor(given.num_pages, limits.page_size, given.num_slots)),
            costs,
            vocab_size=VOCAB_SIZE,
        )
        self.cluster = Cluster(
            settings,
            make_pool(GatewayConfig(**gateway), MODEL, 1),
            num_prefill=num_prefill,
            num_decode=num_decode,
            on_end=self._on_end,
        )
        self.events = self.cluster.events
        self.asked: dict[str, GenerateRequest] = {}
        self.ended: dict[str, Answer] = {}  # in order of their ends
        self.refused: dict[str, RequestError] = {}

    def _on_end(self, answer: Answer) -> None:
        assert answer.request.rid not in self.ended, "a request ended twice"
        self.ended[answer.request.rid] = answer

    # ---- clients ----------------------------------------------------------------------------------------------------

    def submit(
        self, rid: str, prompt: Sequence[int], max_new: int, *,
        at: float = 0.0, seed: int = 0, grammar: str = "", **more: Any,
    ) -> None:  # fmt: skip
        """Submit a request at the instant ``at``; ``more`` are fields of ``GenerateRequest``."""
        sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True, seed=seed, grammar=grammar)
        ask = self.asked[rid] = GenerateRequest(rid, rid, tuple(prompt), sampling, model=MODEL, **more)
        self.events.at(at, self._send, ask)

    def _send(self, ask: GenerateRequest) -> None:
        try:
            self.cluster.gateway.submit(ask)
        except RequestError as error:
            self.refused[ask.rid] = error

    # ---- running ----------------------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        return len(self.ended) + len(self.refused) == len(self.asked)

    def run(self, *, is_checked: bool = True, max_events: int = 200_000) -> None:
        """Run until every request has ended, and check every node after every event.

        Raises:
            AssertionError: a check failed, or nothing advances although requests wait.
        """
        for _ in range(max_events):
            if self.is_done:
                break
            assert not self.events.is_idle or self._moves(), "nothing advances, and requests wait"
            self.step(is_checked=is_checked)
        assert self.is_done, f"not finished after {max_events} events: {self.asked.keys() - self.ended.keys()}"

    def step(self, *, is_checked: bool = True) -> None:
        self.events.step()
        if is_checked:
            self.cluster.check()

    def _moves(self) -> bool:
        """Whether a turn of some node makes progress."""
        for node in self.cluster.nodes.values():
            node.turn()
        return not self.events.is_idle

    def settle(self, seconds: float = 30.0) -> None:
        """Let time pass, so that the last messages arrive."""
        until = self.events.now() + seconds
        self.events.at(until, lambda: None)
        while self.events.now() < until:
            self.step()

    # ---- checks -----------------------------------------------------------------------------------------------------

    def assert_all_is_released(self) -> None:
        """Assert that every page, slot and count has been released."""
        self.settle()
        for node in self.cluster.nodes.values():
            if node.is_alive:
                load = node.role.load()
                assert (load.num_running, load.num_waiting, load.num_quarantined_pages) == (0, 0, 0), node.incarnation
                assert load.num_free_pages + load.num_cached_pages == node.capacity.num_pages, "a page leaked"
                assert self.cluster.gateway.pool.router.load(node.incarnation) == 0
        assert self.cluster.gateway.pool.admission.num_in_flight == 0
        assert self.cluster.network.num_in_flight == 0

    def assert_exact_tokens(self, rid: str) -> None:
        """Assert that all tokens are exact, and complete if the request succeeded."""
        answer, ask = self.ended[rid], self.asked[rid]
        expected = expected_output(ask.prompt, ask.sampling.max_new_tokens)
        assert tuple(answer.ids) == expected[: len(answer.ids)], f"{rid} got wrong tokens"
        assert answer.error is not None or len(answer.ids) == len(expected), f"{rid} got too few tokens"


def prompt_of(length: int, first: int = 7) -> tuple[int, ...]:
    """Return a prompt; prompts with the same ``first`` share a prefix."""
    return tuple((first + 3 * i) % 101 for i in range(length))
