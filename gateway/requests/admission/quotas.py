"""Quotas of tenants: requests in flight and tokens per minute, with a Retry-After for refused requests. Pure.

Tokens are counted in a bucket that holds the tokens of one minute and fills evenly. A request is accepted while the
bucket is not empty. It is charged its prompt and predicted output, and at its end the difference to the real numbers.
So the bucket may be in debt; a request refused for that reason is told when the debt will be paid off.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping

from common.config.tenancy import OTHER_TENANTS, Quota
from common.errors import ErrorCode, RequestError
from gateway.requests.admission.admission import Admission
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream

#: Remembered tenants without requests in flight. Names may come from clients, so their number is bounded.
MAX_IDLE_TENANTS = 10_000
#: One token of credit, less a margin for rounding of the promised time.
ONE_TOKEN = 1.0 - 1e-6


class _Account:
    def __init__(self, quota: Quota, now: float) -> None:
        self.quota = quota
        self.in_flight = Admission(quota.requests or 0)
        self._capacity = float(quota.tokens_per_minute or 0)
        self._balance = self._capacity
        self._counted_at = now

    def change(self, quota: Quota, now: float) -> None:
        """Set other limits. A tenant that had no limit of tokens begins with a full minute."""
        self.balance(now)  # what was earned until now was earned at the rate so far
        if self.quota.tokens_per_minute is None:
            self._balance = math.inf
        self.quota = quota
        self.in_flight.max_queued = quota.requests or 0
        self._capacity = float(quota.tokens_per_minute or 0)
        self._balance = min(self._balance, self._capacity)

    def balance(self, now: float) -> float:
        grown = self._balance + self._capacity / 60.0 * (now - self._counted_at)
        self._balance, self._counted_at = min(grown, self._capacity), now
        return self._balance

    def charge(self, tokens: float, now: float) -> None:
        self._balance = min(self.balance(now) - tokens, self._capacity)

    def payable_in_s(self, now: float) -> float:
        """Seconds until the first token of credit."""
        return max(1.0, math.ceil((1.0 - self.balance(now)) / (self._capacity / 60.0)))


class Quotas:
    """The accounts of all tenants.

    Args:
        quotas: by tenant; ``*`` applies to each tenant that is not named. Requests without a tenant have no quota.
    """

    def __init__(self, quotas: Mapping[str, Quota]) -> None:
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self.replace(quotas, 0.0)

    def replace(self, quotas: Mapping[str, Quota], now: float) -> None:
        """Replace all quotas. The requests in flight and the used tokens of each tenant stay counted."""
        self._quotas = dict(quotas)
        self._others = self._quotas.pop(OTHER_TENANTS, Quota())
        for tenant, account in self._accounts.items():
            account.change(self._quotas.get(tenant, self._others), now)

    def has_limits(self, tenant: str) -> bool:
        return bool(tenant) and self._quotas.get(tenant, self._others) != Quota()

    def check(self, tenant: str, now: float, *, count: int = 1) -> None:
        """Refuse a request with so many outputs if its tenant may have no more.

        Raises RequestError: more than the tenant may have in flight, ever (400) or now (429), or per minute (429).
        """
        if not self.has_limits(tenant):
            return
        account = self._account(tenant, now)
        quota = account.quota
        if quota.requests is not None:
            if count > quota.requests:
                message = f"{count} outputs in one request, but the tenant {tenant} may have {quota.requests} in flight"
                raise RequestError(ErrorCode.INVALID_REQUEST, message)
            excess = account.in_flight.excess(count, 0)
            if excess > 0:
                message = f"the tenant {tenant} has {account.in_flight.num_in_flight} requests in flight"
                message += f", its quota is {quota.requests}"
                raise _too_much(message, account.in_flight.retry_after(excess, now))
        if quota.tokens_per_minute is not None and account.balance(now) < ONE_TOKEN:
            message = f"the tenant {tenant} has used its quota of {quota.tokens_per_minute} tokens per minute"
            raise _too_much(message, account.payable_in_s(now))

    def admit(self, tenant: str, count: int, tokens: int, now: float, *, is_continued: bool = False) -> None:
        """Count the outputs of a request and the tokens of its prompts and predicted outputs in, or refuse it.

        Args:
            is_continued: another gateway has accepted them. They are counted in even beyond the quota.

        Raises RequestError: as ``check``.
        """
        if not tenant:
            return
        if not is_continued:
            self.check(tenant, now, count=count)
        account = self._account(tenant, now)
        account.in_flight.admit(count, max_running=1 << 31, now=now)
        account.charge(tokens, now)

    def ended(self, tenant: str, *, charged: int, tokens: int, now: float, in_flight_s: float | None = None) -> None:
        """One output has ended.

        Args:
            charged: tokens charged at its arrival.
            tokens: real number of its prompt and output tokens.
            in_flight_s: for how long it was in flight; None if it was refused.
        """
        account = self._accounts.get(tenant)
        if account is not None:
            account.in_flight.release(now, served_s=in_flight_s)
            account.charge(tokens - charged, now)
            if account.quota == Quota() and not account.in_flight.num_in_flight:
                del self._accounts[tenant]  # it says nothing, and must not displace an account with limits

    def settle(self, stream: OutputStream) -> None:
        """Replace the expected cost of an ended output by its real one, which is 0 if no node has got the request."""
        request = stream.request
        tokens = len(request.prompt) + len(stream.ids) if stream.num_attempts or stream.ids else 0
        now, in_flight_s = stream.ended_at, stream.ended_at - stream.started_at
        self.ended(request.tenant, charged=charge(request), tokens=tokens, now=now, in_flight_s=in_flight_s)

    def _account(self, tenant: str, now: float) -> _Account:
        """The account of a tenant. Those without limits have one too, since they may get limits at any time."""
        account = self._accounts.get(tenant)
        if account is None:
            self._forget_idle()
            account = self._accounts[tenant] = _Account(self._quotas.get(tenant, self._others), now)
        self._accounts.move_to_end(tenant)
        return account

    def _forget_idle(self) -> None:
        """Drop the least recently used account without requests in flight, if there are too many."""
        if len(self._accounts) >= MAX_IDLE_TENANTS:
            oldest = next((name for name, account in self._accounts.items() if not account.in_flight.num_in_flight), "")
            self._accounts.pop(oldest, None)


def charge(request: GenerateRequest) -> int:
    """Tokens that an output is expected to cost its tenant."""
    return len(request.prompt) + request.expected_output


def _too_much(message: str, retry_after_s: float) -> RequestError:
    return RequestError(ErrorCode.QUEUE_FULL, message, retry_after_s=retry_after_s)
