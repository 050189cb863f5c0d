"""The decode node's side of NIXL: offer the agent's metadata, keep UCX going while pages may come, and take back pages
that were granted to a writer on another host that has fallen silent.
"""

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.config.shared import UCX
from common.errors import ConfigError
from kv_transfer.page_slices import PageSlice
from kv_transfer.page_store import PageStore
from kv_transfer.transports.base import Fenced, InPlace, ReaderTransport
from kv_transfer.transports.nixl.agent import CLOSE_TIMEOUT_S, NUM_PROBE_AREAS, Agent, ProbeMemory
from kv_transfer.transports.nixl.handshake import CLOSING_S
from kv_transfer.transports.nixl.peer_state import Endpoint, host_id, sealed
from kv_transfer.transports.shm.reader import ShmReader

log = logging.getLogger(__name__)

#: An offer that no writer has taken up by then needs no attention.
OFFER_S = 15.0
PAUSE_S = 200e-6
RENEWAL_S = 5.0  # between two invalidations, so that one bad pair does not block all others
INVALIDATED = "the pool was registered with NIXL again"


@dataclass(slots=True, eq=False)
class _Offer:
    """An offer to one peer under one epoch. ``agent``: whose metadata it carries."""

    epoch: int
    agent: Agent
    at: float
    is_chosen: bool = False


class NixlReader(ReaderTransport):
    """``ReaderTransport`` of a decode node.

    Args:
        key: the cluster's; offers are sealed with it.
        is_direct: pages arrive in the GPU's own memory.
        backend: of NIXL.

    Raises:
        ConfigError: NIXL is not installed or does not work here, or not for this pool.
    """

    name = "nixl"

    def __init__(
        self,
        store: PageStore,
        incarnation: str = "",
        *,
        key: bytes = b"",
        is_direct: bool = False,
        backend: str = UCX,
    ) -> None:
        self._backend = backend
        # outlives the agents, since a late writer of this host may still use its address
        self._probe = ProbeMemory(store, is_direct=is_direct)
        self.store: PageStore = InPlace(store) if is_direct else store
        self._incarnation = incarnation
        self._key = key
        self._watch = ShmReader(store, incarnation, is_shared=False)  # watches writers on this host
        self._host = host_id()
        try:
            self._agent = self._make_agent()
        except BaseException:
            self._watch.close()
            raise
        self._old: Agent | None = None  # serves the pairs that were formed with it until it can be closed
        self._expected: dict[int, None] = {}  # pages that may be written
        self._offers: dict[str, list[_Offer]] = {}  # by peer; offers that are not known to be over
        self._news: deque[Fenced] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # guards the offered agent and the epochs under which it is offered
        self._newest_epoch = self._last_of_old = self._voided = 0
        self._num_invalidations = 0
        self._area = 0  # that was handed out last
        self._closing_until = self._renewed_at = 0.0
        self._is_wanted_back = False
        self._has_failed = backend != UCX  # invalidation proves nothing, as far as is known
        self._is_open = True
        self._is_awake = threading.Event()
        self._thread = threading.Thread(target=self._progress, name="nixl-receive", daemon=True)
        self._thread.start()

    def _make_agent(self) -> Agent:
        return Agent(self.store, f"decode-{self._incarnation}-{secrets.token_hex(4)}", self._probe, self._backend)

    def offer(self, peer: str, epoch: int) -> str:
        self.withdraw(peer)
        with self._lock:
            agent, self._newest_epoch = self._agent, epoch
            self._offers.setdefault(peer, []).append(_Offer(epoch, agent, time.monotonic()))
        self._is_awake.set()
        pool = agent.pool
        self._area = (self._area + 1) % NUM_PROBE_AREAS  # the ranks of a peer have one epoch
        probe_at, _, _ = agent.probe.outgoing(self._area)
        watch_address = self._watch.offer(peer, epoch)
        endpoint = Endpoint(
            agent.metadata,
            pool.at,
            probe_at,
            watch_address,
            self._host,
            self._voided,
            kind=pool.kind,
            device=pool.device,
            backend=self._backend,
        )
        return sealed(endpoint, self._key)

    def withdraw(self, peer: str) -> None:
        self._watch.withdraw(peer)
        self._keep(peer, [offer for offer in self._offers.get(peer, ()) if offer.is_chosen])

    def _keep(self, peer: str, offers: list[_Offer]) -> None:
        self._offers[peer] = offers
        if not offers:
            del self._offers[peer]

    def chosen(self, peer: str, epoch: int, transport: str) -> bool:
        if transport != self.name:
            self.withdraw(peer)
            return False
        # The peer attaches again only when it has dropped its earlier attachment.
        self._keep(peer, [offer for offer in self._offers.get(peer, ()) if offer.epoch == epoch])
        for offer in self._offers.get(peer, ()):
            offer.is_chosen = True
            if offer.agent.is_gone:  # attaching took longer than we wait
                self._news.append(Fenced(peer, epoch, INVALIDATED))
        return True

    def allow(self, peer: str, epoch: int, pages: Sequence[int], again: PageSlice | None = None) -> None:
        self._expected.update(dict.fromkeys(pages))
        self._is_awake.set()

    def forbid(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._expected.pop(page, None)

    def poll(self, now: float) -> list[Fenced]:
        fenced = self._watch.poll(now)
        if fenced:
            self._closing_until = time.monotonic() + CLOSING_S
            self._is_awake.set()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        fenced += [self._news.popleft() for _ in range(len(self._news))]
        for news in fenced:
            self._keep(news.peer, [offer for offer in self._offers.get(news.peer, ()) if offer.epoch > news.epoch])
        return fenced

    # ---- what a writer on another host was granted ----------------------------------------------------------------

    def reclaim(self, peer: str, epoch: int) -> None:
        """Has no effect while a process of this host is watched that attached through this agent; the package's
        docstring says why.
        """
        offers = [offer for offer in self._offers.get(peer, ()) if offer.epoch == epoch]
        if not offers or self._has_failed or self._watched(self._offers):
            return
        with self._lock:
            self._is_wanted_back |= self._old is None and any(offer.agent is self._agent for offer in offers)
        self._is_awake.set()

    def _watched(self, peers: Iterable[str]) -> bool:
        watched = self._watch.watched()
        return any((peer, offer.epoch) in watched for peer in peers for offer in self._offers.get(peer, ()))

    def _invalidate(self) -> None:
        """Make a step towards a new agent. Runs in the thread; the old agent goes when no writer is attaching to it."""
        if self._old is None:
            if self._renewed_at + RENEWAL_S <= time.monotonic():
                self._replace()
            return
        all_offers = [(peer, offer) for peer, offers in list(self._offers.items()) for offer in offers]
        others = [(peer, offer) for peer, offer in all_offers if offer.agent is self._old]
        since = time.monotonic() - OFFER_S
        is_attaching = any(not offer.is_chosen and offer.at > since for _, offer in others)
        if is_attaching or self._watched([peer for peer, _ in others]):
            return
        old, self._old = self._old, None
        with contextlib.suppress(Exception):  # NIXL's own errors have no common root
            old.close()
        if not old.is_gone:
            self._has_failed = True  # for good: what this agent admits must not be declared void
            log.error("NIXL did not release the pool: pages granted to lost prefill nodes stay in quarantine")
            return
        self._voided = self._last_of_old
        self._num_invalidations += 1
        fenced = [(peer, offer.epoch) for peer, offer in others if offer.is_chosen]
        self._news += [Fenced(peer, epoch, INVALIDATED) for peer, epoch in fenced]
        with contextlib.suppress(OSError):  # closed meanwhile
            os.eventfd_write(self._wake, 1)

    def _replace(self) -> None:
        try:
            agent = self._make_agent()
        except ConfigError as error:
            self._has_failed, self._is_wanted_back = True, False
            log.error("pages granted to lost prefill nodes stay in quarantine: %s", error)
            return
        with self._lock:
            self._old, self._agent, self._last_of_old = self._agent, agent, self._newest_epoch
            self._is_wanted_back, self._renewed_at = False, time.monotonic()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _progress(self) -> None:
        self._probe.enter_context()
        while self._is_open:
            for agent in filter(None, (self._agent, self._old)):
                agent.progress()
            if self._is_wanted_back or self._old is not None:
                self._invalidate()
            if self._is_idle():
                self._is_awake.clear()
                if self._is_idle() and self._is_open:
                    self._is_awake.wait(1.0)
            time.sleep(PAUSE_S)
        for agent in filter(None, (self._agent, self._old)):
            with contextlib.suppress(Exception):  # NIXL's own errors have no common root
                agent.close()

    def _is_idle(self) -> bool:
        since = time.monotonic() - OFFER_S
        offers = [offer for offers in list(self._offers.values()) for offer in offers]
        is_offering = any(not offer.is_chosen and offer.at > since for offer in offers)
        return not (self._expected or is_offering or self._is_wanted_back or self._closing_until > time.monotonic())

    def counters(self) -> dict[str, float]:
        return {**self._watch.counters(), "nixl_invalidations": float(self._num_invalidations)}

    def files(self) -> Sequence[int]:
        return (*self._watch.files(), self._wake) if self._is_open else ()

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._is_awake.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("a call to nixl does not return: the pool stays registered with it until the process ends")
        self._watch.close()
        wake, self._wake = self._wake, -1
        os.close(wake)
