"""Values that clients may ask for again, kept within limits that no tenant uses up for the others. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=tuple[Any, ...])
Value = TypeVar("Value")
#: A value, its bytes, and when it was used last.
Entry = tuple[Value, int, float]


class TenantCache(Generic[Key, Value]):
    """Values by keys that begin with the tenant.

    If there are too many, the tenant that has most of them loses those that it has not used for longest; if they take
    too many bytes, the tenant whose values take most.

    Args:
        max_values: 0 keeps nothing.
        max_age_s: seconds after its last use for which a value is kept.
    """

    def __init__(self, *, max_values: int, max_bytes: int, max_age_s: float) -> None:
        self._max_values = max_values
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._entries: OrderedDict[Key, Entry[Value]] = OrderedDict()  # the least recently used first
        self._num_values: Counter[str] = Counter()  # by tenant
        self._num_bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    @property
    def is_enabled(self) -> bool:
        return self._max_values > 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes.total()

    def fits(self, num_bytes: int) -> bool:
        """Whether a value of this size can be kept at all."""
        return self.is_enabled and num_bytes <= self._max_bytes

    def get(self, key: Key) -> Value | None:
        return self._entries[key][0] if key in self._entries else None

    def use(self, key: Key, now: float) -> Value | None:
        """As ``get``; the value is now the most recently used one."""
        if key not in self._entries:
            return None
        value, num_bytes, _ = self._entries.pop(key)
        self._entries[key] = value, num_bytes, now
        return value

    def add(self, key: Key, value: Value, num_bytes: int, now: float) -> None:
        """Add a value that ``fits``, in place of any other with its key. ``shrink`` must follow."""
        self.drop(key)
        self._entries[key] = value, num_bytes, now
        self._num_values[key[0]] += 1
        self._num_bytes[key[0]] += num_bytes

    def shrink(self) -> None:
        """Drop values until the others are within the limits."""
        while len(self._entries) > self._max_values:
            self._drop_of_largest(self._num_values)
        while self.num_bytes > self._max_bytes:
            self._drop_of_largest(self._num_bytes)

    def _drop_of_largest(self, amounts: Counter[str]) -> None:
        """Drop the value that the tenant with the largest amount has not used for longest."""
        [(largest, _)] = amounts.most_common(1)
        self.drop(next(key for key in self._entries if key[0] == largest))

    def expire(self, now: float) -> None:
        """Drop the values that have not been used for too long."""
        while self._entries:
            key, (_, _, used_at) = next(iter(self._entries.items()))
            if now - used_at <= self._max_age_s:
                return
            self.drop(key)

    def drop(self, key: Key) -> bool:
        """Drop a value; False if there is none."""
        if key not in self._entries:
            return False
        _, num_bytes, _ = self._entries.pop(key)
        self._num_values[key[0]] -= 1
        self._num_bytes[key[0]] -= num_bytes
        if not self._num_values[key[0]]:
            del self._num_values[key[0]], self._num_bytes[key[0]]
        return True

    def check(self) -> None:
        """Recount values and bytes. Raises AssertionError."""
        num_values, counted = Counter(key[0] for key in self._entries), Counter[str]()
        for key, (_, num_bytes, _) in self._entries.items():
            counted[key[0]] += num_bytes
        assert (num_values, counted) == (self._num_values, self._num_bytes)
        assert len(self._entries) <= self._max_values
        assert self.num_bytes <= self._max_bytes
