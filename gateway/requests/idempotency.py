"""Requests that their clients may send again: each is known by a key, and runs once. Pure.

A client names a request by an ``Idempotency-Key``, or by its own ``rid``. The same request with the same key gets the
outputs of the first one, while they run and for a time after they have ended. Outputs are kept as they are, so that an
answer can be written again from its first token. An output that failed is not kept: its request runs again.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from common.errors import ErrorCode, RequestError
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream
from gateway.requests.tenant_cache import TenantCache

MAX_KEY_LENGTH = 255
#: Bytes that are counted for one token of a prompt, for one of an output with its piece of text, for each output
#: beside, for the log-probabilities of a token beside their packed length, and for a piece of an output that is divided
#: into its parts. They are those of Python's objects.
PROMPT_TOKEN_BYTES, OUTPUT_TOKEN_BYTES, OUTPUT_BYTES, LOGPROB_BYTES, PIECE_BYTES = 36, 100, 2_048, 60, 60

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
    requests: Sequence[GenerateRequest], identity: RequestIdentity, *, draws_seed: Callable[[GenerateRequest], bool]
) -> list[GenerateRequest]:
    """Requests that other gateways find at the nodes by their key.

    Args:
        draws_seed: whether the seed of a request follows from the key too, so that a new run after a loss samples the
            same tokens.
    """
    digest = identity.digest
    first = int(digest[:16], 16)
    keyed: list[GenerateRequest] = []
    for i, request in enumerate(requests):
        seed = (first + i) % 2**64 if draws_seed(request) else request.sampling.seed
        sampling = request.sampling._replace(seed=seed)
        keyed.append(msgspec.structs.replace(request, sampling=sampling, key=f"{digest}-{i}"))
    return keyed


class Reader(Protocol):
    """Writes outputs to an answer."""

    def wake(self, stream: OutputStream) -> None: ...

    def end(self) -> None:
        """End the answer, since its client has asked again."""
        ...


@dataclass(slots=True, eq=False)
class KeyedRequest:
    """A request with a key, and its outputs.

    Attributes:
        answer_id: of its answer, which every retry gets too.
        reader: of the last client that asked for it, or what stands for it after it has left; None without one.
        num_ended: outputs that have ended.
        has_failed: one of them has failed.
    """

    identity: RequestIdentity
    answer_id: str
    store: "IdempotencyStore"
    reader: Reader | None = None
    streams: list[OutputStream] = field(default_factory=list)
    num_ended: int = 0
    has_failed: bool = False

    @property
    def is_ended(self) -> bool:
        return self.num_ended == len(self.streams)

    @property
    def num_bytes(self) -> int:
        return sum(map(_num_bytes, self.streams))

    def wake(self, stream: OutputStream) -> None:
        """Pass on that an output has something new."""
        if stream.is_ended:
            self.num_ended += 1
            self.has_failed |= stream.error is not None
            self.store.on_output_ended(self)
        if self.reader is not None:
            self.reader.wake(stream)

    def attach(self, reader: Reader) -> None:
        """Give the outputs to another reader, from their beginning, and end the answer that had them."""
        previous, self.reader = self.reader, reader
        for stream in self.streams:
            stream.rewind()
            if stream.ids or stream.is_ended:
                reader.wake(stream)
        if previous is not None:
            previous.end()

    def detach(self, reader: Reader) -> bool:
        """Let a reader go; False if another one has taken the outputs over."""
        if self.reader is not reader:
            return False
        self.reader = None
        return True


class IdempotencyStore:
    """Requests with keys, by tenant and key. Those in flight are all known, those that have ended as a ``TenantCache``
    keeps them.

    Args:
        max_results: 0 keeps no output that has ended.
        max_age_s: seconds after its end for which a request is kept.
    """

    def __init__(self, *, max_results: int, max_bytes: int, max_age_s: float) -> None:
        self._in_flight: dict[Index, KeyedRequest] = {}
        self._ended: TenantCache[Index, KeyedRequest] = TenantCache(
            max_values=max_results, max_bytes=max_bytes, max_age_s=max_age_s
        )

    def __len__(self) -> int:
        return len(self._in_flight) + len(self._ended)

    def find(self, identity: RequestIdentity, now: float) -> KeyedRequest | None:
        """The request that this one repeats; None if it is new.

        Raises RequestError: another request has the same ``Idempotency-Key``.
        """
        self._ended.expire(now)
        known = self._in_flight.get(identity.index) or self._ended.get(identity.index)
        if known is None or known.identity == identity:
            return known
        if not identity.is_rid:
            message = (
                "Idempotency-Key: the key was used for a request with another body or path; repeat that request as it "
                "was, or give this one a key of its own"
            )
            raise RequestError(ErrorCode.IDEMPOTENCY_KEY_REUSED, message)
        return None  # the dispatcher refuses an id that is in flight

    def add(self, request: KeyedRequest) -> None:
        """Make a request known whose outputs have been sent to nodes, or wait."""
        if not request.has_failed:
            self._ended.drop(request.identity.index)  # an ended request of the same rid
            self._in_flight[request.identity.index] = request
            self.on_output_ended(request)  # if the nodes had all of its outputs

    def on_output_ended(self, request: KeyedRequest) -> None:
        """Keep a request whose outputs have ended well, and forget one with an output that failed."""
        index = request.identity.index
        if self._in_flight.get(index) is not request or not (request.has_failed or request.is_ended):
            return
        del self._in_flight[index]
        if request.has_failed:
            return
        for stream in request.streams:
            stream.compact()
        num_bytes = request.num_bytes
        if self._ended.fits(num_bytes):
            self._ended.add(index, request, num_bytes, max(stream.ended_at for stream in request.streams))
            self._ended.shrink()

    def check(self) -> None:
        """Recount the bytes. Raises AssertionError."""
        self._ended.check()
        assert not any(index in self._in_flight for index in self._ended)


def _num_bytes(stream: OutputStream) -> int:
    request = stream.request
    logprobs = [*stream.prompt_logprobs, *stream.logprobs]
    return (
        OUTPUT_BYTES
        + PROMPT_TOKEN_BYTES * len(request.prompt)
        + OUTPUT_TOKEN_BYTES * len(stream.ids)
        + LOGPROB_BYTES * len(logprobs)
        + sum(map(len, logprobs))
        + PIECE_BYTES * (len(stream.pieces) + len(stream.text_spans))
        + len(stream.text) * (2 if stream.pieces else 1)
        + 4 * len(request.echo)
    )
