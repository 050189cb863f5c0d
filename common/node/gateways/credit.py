"""How a node divides the requests that it runs at once among its gateways. Pure.

Each gateway queues its own requests and sends a node at most its *share*. Shares follow what the gateways want to send.
Together they never exceed the room of the node: a share is promised until the gateway has acknowledged a smaller one,
and requests count for the gateway that sent them until they have left.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Account:
    """One gateway.

    Attributes:
        demand: requests that it has in flight or waiting, at all nodes.
        known: the latest share that it has acknowledged.
        offers: the shares that it was told since, oldest first.
    """

    demand: int = 0
    known: int = 0
    offers: deque[int] = field(default_factory=deque)

    @property
    def promised(self) -> int:
        """The largest share by which it may still go."""
        return max(self.known, *self.offers) if self.offers else self.known


class Credit:
    """Divides the room of a node among its gateways.

    Args:
        room: requests that the node runs at once.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._accounts: dict[str, Account] = {}

    def join(self, gateway: str) -> None:
        """The gateway registers the node, and knows no share of it."""
        self._accounts[gateway] = Account()

    def leave(self, gateway: str) -> None:
        """The gateway sends nothing more; its requests count as long as they are here."""
        self._accounts.pop(gateway, None)

    def acknowledge(self, gateway: str, demand: int) -> None:
        """The gateway goes by the oldest share that it has not acknowledged before; what it sent until then is here."""
        account = self._accounts.get(gateway)
        if account is not None and account.offers:
            account.demand, account.known = demand, account.offers.popleft()

    def offer(self, gateway: str, in_flight: Mapping[str, int]) -> int:
        """The share to tell a gateway now, out of the room that is promised to no other.

        Args:
            in_flight: requests by gateway, as ``RequestOwners.num_on_node`` counts them.
        """
        account = self._accounts.setdefault(gateway, Account())
        promised = {name: account.promised for name, account in self._accounts.items()}
        others = dict.fromkeys([*promised, *in_flight])
        others.pop(gateway)
        taken = sum(max(in_flight.get(other, 0), promised.get(other, 0)) for other in others)
        wanted = divide(self._room, {name: one.demand for name, one in self._accounts.items()})[gateway]
        share = max(0, min(wanted, self._room - taken))
        account.offers.append(share)
        return share

    def check(self) -> None:
        """Raises AssertionError: more is promised than there is room."""
        assert sum(account.promised for account in self._accounts.values()) <= self._room


def divide(room: int, demands: Mapping[str, int]) -> dict[str, int]:
    """Divide room so that the smallest demands are met first, and divide what is left equally."""
    shares = dict.fromkeys(demands, 0)
    left = room
    waiting = sorted(demands, key=lambda name: demands[name])
    while waiting:
        name = waiting.pop(0)
        shares[name] = min(demands[name], left // (len(waiting) + 1))
        left -= shares[name]
    each, more = divmod(left, len(shares)) if shares else (0, 0)
    return {name: share + each + (i < more) for i, (name, share) in enumerate(shares.items())}
