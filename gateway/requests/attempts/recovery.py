"""Decides how a request goes on after an attempt that ended without its fault. Pure.

A further attempt continues after the output so far. When it is made, and on which nodes, follows from how the attempts
before it ended:

- After a loss that the gateway has seen itself, the next attempt follows at once. After a failure on nodes that live
  on, it follows after a back-off that doubles with every failure in a row, and avoids the nodes that may be the cause.
- After the first failure of a node that says that it ends (``GONE``), the next attempt follows at once, too.
- A request whose attempts were ended ``NUM_LOSSES`` times in a row by the loss or the failure of a node may be what
  kills the nodes. It is *suspect*: its next attempts get no other requests on their nodes. If one is lost that had
  its nodes for itself from the beginning, the request ends; a loss that others shared says too little.
- The loss of a node whose heartbeats were overdue before it got the request says nothing about the request. Nor does a
  loss that only another node reports, until the gateway itself has lost that node.
- Attempts are in a row if fewer than ``NUM_PROGRESS`` output tokens came between them: a request that kills its nodes
  does so again where it continues.
- A request ends that has waited for its next attempts for the whole recovery timeout since its last token. Time at its
  nodes does not count, nor does time in which the nodes were full, or others had them for themselves.
- A request that a full node refuses is tried again likewise, since ``Admission`` has accepted it. It waits as in the
  gateway's own queue, before all requests that have not been sent.
"""

from dataclasses import dataclass
from typing import NamedTuple

from common.errors import ErrorCode, RequestError

NUM_LOSSES = 2
NUM_PROGRESS = 8
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0

#: Those with which a node says that it ends: it takes no more requests. With ``INTERNAL`` it has failed.
GONE = frozenset({ErrorCode.SHUTTING_DOWN, ErrorCode.INTERNAL})


class AttemptEnd(NamedTuple):
    """How an attempt ended.

    Attributes:
        avoid: incarnations that the next attempt avoids if others can serve the request.
        decode: incarnation of the decode node that has pages of the request and should keep it; None for any.
        is_seen: the gateway itself has seen the loss, so that no later attempt goes to the lost node.
        is_loss: it counts towards the suspicion that the request kills its nodes.
        reported: incarnation of a node that another node calls lost; empty for none.
        began_at: when the attempt was sent.
    """

    code: ErrorCode
    message: str
    avoid: frozenset[str] = frozenset()
    decode: str | None = None
    is_seen: bool = False
    is_loss: bool = False
    reported: str = ""
    began_at: float = 0.0


@dataclass(slots=True, eq=False)
class Recovery:
    """What is remembered of a request after the first attempt that ended without its fault.

    Attributes:
        revision: the weights that made the output so far; empty while there is none.
        last: how the last attempt ended.
        since: when the first attempt ended after which no further token came.
        num_output: output tokens at the end of the last attempt.
        num_ended, num_losses: attempts in a row that ended, and those that count as losses.
        is_alone: the latest attempt has its nodes for itself from the beginning.
        was_alone: the same of the last attempt that has ended.
        is_guilty: such an attempt of a suspect request was lost.
    """

    last: AttemptEnd
    since: float
    num_output: int
    revision: str = ""
    num_ended: int = 0
    num_losses: int = 0
    is_alone: bool = False
    was_alone: bool = False
    is_guilty: bool = False

    @property
    def is_suspect(self) -> bool:
        return self.num_losses >= NUM_LOSSES

    def has_progressed(self, num_output: int) -> bool:
        return num_output >= self.num_output + NUM_PROGRESS

    def ended(self, end: AttemptEnd, *, num_output: int, revision: str, now: float) -> float:
        """Take the end of one more attempt. Return the seconds until the next one."""
        if self.has_progressed(num_output):
            self.num_ended = self.num_losses = 0
        if not self.num_ended or num_output > self.num_output:
            self.since = now
        self.last, self.num_output, self.was_alone = end, num_output, self.is_alone
        self.revision = revision if num_output else ""
        self.num_ended += 1
        if end.is_loss:
            self._count_loss()
        if end.is_seen or (end.code in GONE and self.num_ended == 1):
            return 0.0
        return float(min(MIN_BACKOFF_S * 2.0 ** min(self.num_ended - 1, 16), MAX_BACKOFF_S))

    def confirms(self, incarnation: str, alive_until: float) -> bool:
        """The gateway has lost a node. Return whether this counts as the loss that another node has reported.

        Args:
            alive_until: the node was probably alive until then.
        """
        if self.last.reported != incarnation:
            return False
        is_loss = self.last.began_at <= alive_until
        self.last = self.last._replace(reported="")
        if is_loss:
            self._count_loss()
        return is_loss

    def _count_loss(self) -> None:
        self.is_guilty |= self.is_suspect and self.was_alone
        self.num_losses += 1

    def waits(self, seconds: float) -> None:
        """Leave so many seconds out of the recovery timeout: those at nodes, and those of waiting for the retry budget,
        for room on full nodes, or for nodes that a suspect request has for itself."""
        self.since += seconds

    def verdict(self, now: float, *, timeout_s: float) -> RequestError | None:
        """The error with which the request ends after its last attempt; None if it is tried again."""
        if self.is_guilty:
            message = f"{self.last.message}; {self.num_losses} attempts ended like this, the last with the nodes for"
            return RequestError(ErrorCode.NODE_LOST, f"{message} itself, so the request is not tried again")
        if now - self.since > timeout_s:
            message = f"{self.last.message}; no attempt came further within --recovery-timeout {timeout_s:g} s"
            return RequestError(self.last.code, message)
        return None

    def expired(self, now: float, *, timeout_s: float, lacking: str) -> RequestError | None:
        """The error of a request that has waited too long for its next attempt; None while it may wait on.

        Args:
            lacking: what it waits for, in words.
        """
        if now - self.since <= timeout_s:
            return None
        code = ErrorCode.NODE_LOST if self.last.code is ErrorCode.NODE_LOST else ErrorCode.NO_ROUTE
        message = f"{self.last.message}; no {lacking} came within --recovery-timeout {timeout_s:g} s"
        return RequestError(code, message)
