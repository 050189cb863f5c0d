"""Requests that their clients may send again: each is known by a key, and runs once. Pure.

A client names a request by an ``Idempotency-Key``, or by its own ``rid``. The same request with the same key gets the
outputs of the first one, while they run and for a time after they have ended. Outputs are kept as they are, so that an
answer can be written again from its first token. An output that failed is not kept: its request runs again.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from common.errors import ErrorCode, RequestError
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream

MAX_KEY_LENGTH = 255
#: Bytes that are counted for one token of a prompt, for one of an output with its piece of text, for each output
#: beside, and for the log-probabilities of a token beside their packed length. They are those of Python's objects.
PROMPT_TOKEN_BYTES, OUTPUT_TOKEN_BYTES, OUTPUT_BYTES, LOGPROB_BYTES = 36, 100, 2_048, 60

Index = tuple[str, bool, str]


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """By what a retry is recognized.

    Attributes:
        is_rid: the key is the client's ``rid``, which may name another request once the first has ended.
        fingerprint: hash of the path and the body.
    """

    tenant: str
    key: str
    is_rid: bool
    fingerprint: bytes

    @property
    def index(self) -> Index:
        return self.tenant, self.is_rid, self.key

    @property
    def digest(self) -> str:
        """Names the request at the nodes, which do not learn the key."""
        hashed = hashlib.sha256(self.fingerprint)
        for part in self.index:
            hashed.update(b"\0" + str(part).encode())
        return hashed.hexdigest()


def identify(path: str, body: bytes, tenant: str, header: str | None, rid: str | list[str] | None) -> RequestIdentity:
    """The identity of a request with a key. Raises RequestError: the header is no valid key.

    Args:
        header: of the name ``Idempotency-Key``, which goes before the ``rid``; None without one.
    """
    if header is None:
        assert rid is not None
        key = rid if isinstance(rid, str) else "\0".join(rid)
    elif not 0 < len(header) <= MAX_KEY_LENGTH or not (header.isascii() and header.isprintable()):
        message = f"Idempotency-Key: give one key of 1 to {MAX_KEY_LENGTH} printable ASCII characters"
        raise RequestError(ErrorCode.INVALID_REQUEST, message)
    else:
        key = header
    fingerprint = hashlib.sha256(path.encode() + b"\0" + body).digest()
    return RequestIdentity(tenant, key, header is None, fingerprint)


def with_key(
    requests: Sequence[GenerateRequest], identity: RequestIdentity, *, draws_seeds: bool
) -> list[GenerateRequest]:
    """Requests that other gateways find at the nodes by their key.

    Args:
        draws_seeds: their seeds follow from the key too, so that a new run after a loss samples the same tokens.
    """
    digest = identity.digest
    first = int(digest[:16], 16)
    keyed: list[GenerateRequest] = []
    for i, request in enumerate(requests):
        seed = (first + i) % 2**64 if draws_seeds else request.sampling.seed
        sampling = request.sampling._replace(seed=seed)
        keyed.append(msgspec.structs.replace(request, sampling=sampling, key=f"{digest}-{i}"))
    return keyed


class Reader(Protocol):
    """Writes outputs to an answer."""

    def wake(self, stream: OutputStream) -> None: ...


@dataclass(slots=True, eq=False)
class KeyedRequest:
    """A request with a key, and its outputs.

    Attributes:
        answer_id: of its answer, which every retry gets too.
        reader: of the last client that asked for it; None if that client has left or has read everything.
        num_readers: how many clients have asked for it.
    """

    identity: RequestIdentity
    answer_id: str
    store: "IdempotencyStore"
    reader: Reader | None = None
    num_readers: int = 0
    streams: list[OutputStream] = field(default_factory=list)

    @property
    def is_ended(self) -> bool:
        return all(stream.is_ended for stream in self.streams)

    @property
    def has_failed(self) -> bool:
        return any(stream.error is not None for stream in self.streams)

    @property
    def num_bytes(self) -> int:
        return sum(map(_num_bytes, self.streams))

    def wake(self, stream: OutputStream) -> None:
        """Passes on that an output has something new."""
        if stream.is_ended:
            self.store.on_output_ended(self)
        if self.reader is not None:
            self.reader.wake(stream)

    def attach(self, reader: Reader) -> Reader | None:
        """Gives the outputs to another reader, from their beginning. Returns the reader that they are taken from."""
        previous, self.reader = self.reader, reader
        self.num_readers += 1
        for stream in self.streams:
            stream.rewind()
            if stream.ids or stream.is_ended:
                reader.wake(stream)
        return previous

    def detach(self, reader: Reader) -> bool:
        """Lets a reader go; False if another one has taken the outputs over."""
        if self.reader is not reader:
            return False
        self.reader = None
        return True


class IdempotencyStore:
    """Requests with keys, by tenant and key.

    Those in flight are all known. Those that have ended are kept within limits: if there are too many, the tenant whose
    outputs take the most bytes loses its oldest, so that no tenant displaces the outputs of the others.

    Args:
        max_results: 0 keeps no output that has ended.
        max_age_s: seconds after its end for which a request is kept.
    """

    def __init__(self, *, max_results: int, max_bytes: int, max_age_s: float) -> None:
        self._max_results = max_results
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._in_flight: dict[Index, KeyedRequest] = {}
        self._kept: OrderedDict[Index, tuple[KeyedRequest, int]] = OrderedDict()  # with its bytes, the oldest first
        self._num_bytes: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        return len(self._in_flight) + len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Bytes of the outputs that have ended."""
        return self._num_bytes.total()

    def find(self, identity: RequestIdentity, now: float) -> KeyedRequest | None:
        """The request that this one repeats; None if it is new.

        Raises RequestError: another request has the same ``Idempotency-Key``.
        """
        self._expire(now)
        index = identity.index
        known = self._in_flight.get(index) or self._kept.get(index, (None,))[0]
        if known is None or known.identity == identity:
            return known
        if not identity.is_rid:
            message = (
                "Idempotency-Key: the key was used for a request with another body or path; repeat that request as it "
                "was, or give this one a key of its own"
            )
            raise RequestError(ErrorCode.IDEMPOTENCY_KEY_REUSED, message)
        return None  # the dispatcher refuses an id that is in flight

    def begin(self, identity: RequestIdentity, answer_id: str, reader: Reader) -> KeyedRequest:
        """A new request, which is found after ``add``."""
        return KeyedRequest(identity, answer_id, self, reader, 1)

    def add(self, request: KeyedRequest) -> None:
        """Makes a request known whose outputs have been sent to nodes, or wait."""
        if not request.has_failed:
            self._drop(request.identity.index)  # an ended request of the same rid
            self._in_flight[request.identity.index] = request
            self.on_output_ended(request)  # if the nodes had all of its outputs

    def on_output_ended(self, request: KeyedRequest) -> None:
        """Keeps a request whose outputs have ended well, and forgets one with an output that failed."""
        index = request.identity.index
        if self._in_flight.get(index) is not request or not (request.has_failed or request.is_ended):
            return
        del self._in_flight[index]
        num_bytes = request.num_bytes
        if request.has_failed or not self._max_results or num_bytes > self._max_bytes:
            return
        self._kept[index] = request, num_bytes
        self._num_bytes[index[0]] += num_bytes
        while len(self._kept) > self._max_results or self.num_bytes > self._max_bytes:
            heaviest = max(self._num_bytes, key=lambda tenant: self._num_bytes[tenant])
            self._drop(next(key for key in self._kept if key[0] == heaviest))

    def check(self) -> None:
        """Recounts the bytes. Raises AssertionError."""
        counted: Counter[str] = Counter()
        for (tenant, _, _), (_, num_bytes) in self._kept.items():
            counted[tenant] += num_bytes
        assert counted == self._num_bytes, (counted, self._num_bytes)
        assert len(self._kept) <= self._max_results
        assert self.num_bytes <= self._max_bytes
        assert not self._in_flight.keys() & self._kept.keys()

    def _expire(self, now: float) -> None:
        while self._kept:
            index, (request, _) = next(iter(self._kept.items()))
            if now - max(stream.ended_at for stream in request.streams) <= self._max_age_s:
                return
            self._drop(index)

    def _drop(self, index: Index) -> None:
        _, num_bytes = self._kept.pop(index, (None, 0))
        self._num_bytes[index[0]] -= num_bytes
        if not self._num_bytes[index[0]]:
            del self._num_bytes[index[0]]


def _num_bytes(stream: OutputStream) -> int:
    request = stream.request
    logprobs = [*stream.prompt_logprobs, *stream.logprobs]
    return (
        OUTPUT_BYTES
        + PROMPT_TOKEN_BYTES * len(request.prompt)
        + OUTPUT_TOKEN_BYTES * len(stream.ids)
        + LOGPROB_BYTES * len(logprobs)
        + sum(map(len, logprobs))
        + len(stream.text)
        + 4 * len(request.echo)
    )
