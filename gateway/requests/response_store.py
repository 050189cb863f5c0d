"""Finished responses of ``/v1/responses``, kept so that later requests can continue them. Pure.

The store lives in the memory of one gateway and is bounded by a number of responses, by their bytes and by the time
since they were last used. A response is used when it is read, stored or continued, and then so are all responses that
it continues, so that a conversation never loses its beginning before its end.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

from common.errors import ErrorCode, RequestError

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response that can be continued.

    Attributes:
        previous_id: the response that this one continues, or None.
        input_items: JSON list of the input items of its request.
        output_items: JSON list of the items of its output.
        body: JSON of the whole response.
    """

    response_id: str
    previous_id: str | None
    input_items: bytes
    output_items: bytes
    body: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.input_items) + len(self.output_items) + len(self.body)


@dataclass(slots=True)
class _Entry:
    stored: StoredResponse
    used_at: float


class ResponseStore:
    """Responses by tenant and id.

    If there are too many, the tenant whose responses take the most bytes loses the ones it has not used for longest, so
    that no tenant displaces the responses of the others.

    Args:
        max_responses: 0 turns the store off.
        max_age_s: seconds after its last use for which a response is kept.
    """

    def __init__(self, *, max_responses: int, max_bytes: int, max_age_s: float) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()  # the least recently used first
        self._num_bytes: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_enabled(self) -> bool:
        return self._max_responses > 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes.total()

    def add(self, tenant: str, stored: StoredResponse, now: float) -> None:
        """Stores a response, unless it alone exceeds the limits."""
        self._expire(now)
        if not self.is_enabled or stored.num_bytes > self._max_bytes:
            return
        if (tenant, stored.response_id) in self._entries:  # an answer that was written again
            self._drop((tenant, stored.response_id))
        self._entries[tenant, stored.response_id] = _Entry(stored, now)
        self._num_bytes[tenant] += stored.num_bytes
        self._use(tenant, stored.response_id, now)
        while len(self._entries) > self._max_responses or self.num_bytes > self._max_bytes:
            self._evict()

    def get(self, tenant: str, response_id: str, now: float) -> StoredResponse:
        """Raises RequestError: the tenant has no such response, or no longer."""
        found = self.find(tenant, response_id, now)
        if found is None:
            raise self._missing(response_id)
        return found

    def find(self, tenant: str, response_id: str, now: float) -> StoredResponse | None:
        """A response; None if the tenant has no such response, or no longer."""
        self._expire(now)
        used = self._use(tenant, response_id, now)
        return used[0] if used else None

    def conversation(self, tenant: str, response_id: str, now: float) -> list[StoredResponse]:
        """A response after all responses that it continues, the first one first.

        Raises RequestError: one of them is not stored, or no longer.
        """
        self._expire(now)
        used = self._use(tenant, response_id, now)
        if not used or used[-1].previous_id is not None:
            missing = used[-1].previous_id if used else response_id
            message = f"the response {missing!r} is not stored here (any more); send the whole conversation as input"
            raise RequestError(
                ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND,
                f"previous_response_id: {message}",
                param="previous_response_id",
            )
        return used[::-1]

    def delete(self, tenant: str, response_id: str, now: float) -> None:
        """Raises RequestError: the tenant has no such response, or no longer."""
        self._expire(now)
        if (tenant, response_id) not in self._entries:
            raise self._missing(response_id)
        self._drop((tenant, response_id))

    def check(self) -> None:
        """Recounts the bytes. Raises AssertionError."""
        counted: Counter[str] = Counter()
        for (tenant, _), entry in self._entries.items():
            counted[tenant] += entry.stored.num_bytes
        assert counted == self._num_bytes, (counted, self._num_bytes)
        assert len(self._entries) <= self._max_responses
        assert self.num_bytes <= self._max_bytes

    def _use(self, tenant: str, response_id: str, now: float) -> list[StoredResponse]:
        """Marks a response, and then each one that it continues, as used; returns them in this order.

        The first response of a conversation becomes the most recently used, so it is evicted last.
        """
        used: list[StoredResponse] = []
        next_id: str | None = response_id
        while next_id is not None and (entry := self._entries.get((tenant, next_id))) is not None:
            entry.used_at = now
            self._entries.move_to_end((tenant, next_id))
            used.append(entry.stored)
            next_id = entry.stored.previous_id
        return used

    def _expire(self, now: float) -> None:
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now - entry.used_at <= self._max_age_s:
                return
            self._drop(key)

    def _evict(self) -> None:
        heaviest = max(self._num_bytes, key=lambda tenant: self._num_bytes[tenant])
        self._drop(next(key for key in self._entries if key[0] == heaviest))

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self._num_bytes[key[0]] -= entry.stored.num_bytes
        if not self._num_bytes[key[0]]:
            del self._num_bytes[key[0]]

    @staticmethod
    def _missing(response_id: str) -> RequestError:
        message = f"the response {response_id[:200]!r} is not stored here (any more)"
        return RequestError(ErrorCode.NOT_FOUND, message)
