"""Log-probabilities as the gateway keeps them until it formats them.

Those of a token with 20 alternatives take 2.4 KB as objects, and about 350 bytes packed as MessagePack, which changes
no number. They are kept for all tokens of all outputs of a request until the last output has ended.
"""

from collections.abc import Iterable

import msgspec

from common.sampling_params import TokenLogprobs

#: Those of one token.
PackedLogprobs = bytes

unpack_logprobs = msgspec.msgpack.Decoder(TokenLogprobs).decode
_pack = msgspec.msgpack.Encoder().encode


def pack_logprobs(logprobs: Iterable[TokenLogprobs | None]) -> list[PackedLogprobs | None]:
    return [None if entry is None else _pack(entry) for entry in logprobs]
