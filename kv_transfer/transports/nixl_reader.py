"""The decode node's side of NIXL: offer the agent's metadata, and keep UCX going while pages may come.

See ``nixl`` for the whole story.
"""

import base64
import json
import secrets
import threading
import time
from collections.abc import Sequence

from kv_transfer.pieces import Box
from kv_transfer.transports.base import Fenced, PageStore
from kv_transfer.transports.nixl import Agent
from kv_transfer.transports.shm_reader import ShmReader

#: An offer that nobody has taken up by then needs no attention of ours.
OFFER_S = 15.0
CLOSING_S = 1.0  # UCX needs to be called for so long to close what a writer has let go
PAUSE_S = 200e-6


class NixlReader:
    """``ReaderTransport`` of a decode node.

    Raises:
        ConfigError: NIXL is not installed or does not work here.
    """

    name = "nixl"
    names: Sequence[str] = ("nixl",)

    def __init__(self, store: PageStore, incarnation: str = "") -> None:
        self.store = store
        self._door = ShmReader(store, incarnation, is_shared=False)  # watches writers of this host
        try:
            self._agent = Agent(store, f"decode-{incarnation}-{secrets.token_hex(4)}")
        except BaseException:
            self._door.close()
            raise
        self._metadata = base64.b64encode(self._agent.nixl.get_agent_metadata()).decode()
        self._expected: dict[int, None] = {}  # pages that may be written
        self._offered_at: dict[str, float] = {}
        self._closing_until = 0.0
        self._is_open = True
        self._is_awake = threading.Event()
        self._thread = threading.Thread(target=self._progress, name="nixl-receive", daemon=True)
        self._thread.start()

    def offer(self, peer: str, epoch: int) -> str:
        door = self._door.offer(peer, epoch)
        self._offered_at[peer] = time.monotonic()
        self._is_awake.set()
        return json.dumps(
            {
                "agent": self._metadata,
                "pool_at": self._agent.pool_at,
                "probe_at": self._agent.probe_at,
                "door": door,
            }
        )

    def withdraw(self, peer: str) -> None:
        self._door.withdraw(peer)
        self._offered_at.pop(peer, None)

    def chosen(self, peer: str, epoch: int, transport: str) -> bool:
        self._offered_at.pop(peer, None)
        return transport == self.name

    def allow(self, peer: str, epoch: int, pages: Sequence[int], again: Box | None = None) -> None:
        self._expected.update(dict.fromkeys(pages))
        self._is_awake.set()

    def forbid(self, pages: Sequence[int]) -> None:
        """The writer cannot be stopped: it is fenced, or waited for."""
        for page in pages:
            self._expected.pop(page, None)

    def poll(self, now: float) -> list[Fenced]:
        fenced = self._door.poll(now)
        if fenced:
            self._closing_until = time.monotonic() + CLOSING_S
            self._is_awake.set()
        return fenced

    def _progress(self) -> None:
        """Over TCP, UCX places bytes and answers only when it is called."""
        while self._is_open:
            with self._agent.lock:
                self._agent.nixl.get_new_notifs()
            if self._is_idle():
                self._is_awake.clear()
                if self._is_idle() and self._is_open:
                    self._is_awake.wait(1.0)
            time.sleep(PAUSE_S)

    def _is_idle(self) -> bool:
        now = time.monotonic()
        is_offering = any(at + OFFER_S > now for at in list(self._offered_at.values()))
        return not self._expected and not is_offering and self._closing_until <= now

    def counters(self) -> dict[str, float]:
        return self._door.counters()

    def files(self) -> Sequence[int]:
        return self._door.files()

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._is_awake.set()
        self._thread.join()
        self._door.close()
        self._agent.close()
