"""Finished responses of ``/v1/responses``, kept so that later requests can continue them. Pure.

The store lives in the memory of one gateway and is bounded by a number of responses, by their bytes and by the time
since they were last used. A response is used when it is read, stored or continued, and then so are all responses that
it continues, so that a conversation never loses its beginning before its end.
"""

from dataclasses import dataclass

from common.errors import ErrorCode, RequestError
from gateway.requests.tenant_cache import TenantCache

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response that can be continued.

    Attributes:
        previous_id: the response that this one continues, or None.
        input_items: JSON list of the input items of its request.
        output_items: JSON list of the items of its output, without log-probabilities.
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


class ResponseStore:
    """Responses by tenant and id, in a ``TenantCache``.

    Args:
        max_responses: 0 turns the store off.
        max_age_s: seconds after its last use for which a response is kept.
    """

    def __init__(self, *, max_responses: int, max_bytes: int, max_age_s: float) -> None:
        self._cache: TenantCache[Key, StoredResponse] = TenantCache(
            max_values=max_responses, max_bytes=max_bytes, max_age_s=max_age_s
        )

    def __len__(self) -> int:
        return len(self._cache)

    @property
    def is_enabled(self) -> bool:
        return self._cache.is_enabled

    def add(self, tenant: str, stored: StoredResponse, now: float) -> None:
        """Store a response, unless it alone exceeds the limits."""
        self._cache.expire(now)
        if self._cache.fits(stored.num_bytes):
            self._cache.add((tenant, stored.response_id), stored, stored.num_bytes, now)
            self._use(tenant, stored.response_id, now)
            self._cache.shrink()

    def get(self, tenant: str, response_id: str, now: float) -> StoredResponse:
        """Raises RequestError: the tenant has no such response, or no longer."""
        found = self.find(tenant, response_id, now)
        if found is None:
            raise self._missing(response_id)
        return found

    def find(self, tenant: str, response_id: str, now: float) -> StoredResponse | None:
        """A response; None if the tenant has no such response, or no longer."""
        self._cache.expire(now)
        used = self._use(tenant, response_id, now)
        return used[0] if used else None

    def conversation(self, tenant: str, response_id: str, now: float) -> list[StoredResponse]:
        """A response after all responses that it continues, the first one first.

        Raises RequestError: one of them is not stored, or no longer.
        """
        self._cache.expire(now)
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
        self._cache.expire(now)
        if not self._cache.drop((tenant, response_id)):
            raise self._missing(response_id)

    def check(self) -> None:
        """Recount the bytes. Raises AssertionError."""
        self._cache.check()

    def _use(self, tenant: str, response_id: str, now: float) -> list[StoredResponse]:
        """Mark a response, and then each one that it continues, as used; return them in this order.

        The first response of a conversation becomes the most recently used, so it is evicted last.
        """
        used: list[StoredResponse] = []
        next_id: str | None = response_id
        while next_id is not None and (stored := self._cache.use((tenant, next_id), now)) is not None:
            used.append(stored)
            next_id = stored.previous_id
        return used

    @staticmethod
    def _missing(response_id: str) -> RequestError:
        message = f"the response {response_id[:200]!r} is not stored here (any more)"
        return RequestError(ErrorCode.NOT_FOUND, message)
