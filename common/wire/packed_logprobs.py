"""Log-probabilities as nodes send them, and as the gateway keeps them until it formats them.

Those of a token with 20 alternatives take 2.4 KB as objects, and 0.3 KB packed as MessagePack, which changes no number.
A message may have those of all tokens of a prompt, which the gateway does not unpack on its event loop.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from common.sampling_params import MAX_TOP_LOGPROBS, TokenLogprobs

#: Those of one token.
PackedLogprobs = Annotated[bytes, Meta(max_length=64 + 16 * MAX_TOP_LOGPROBS)]

pack_logprobs: Callable[[TokenLogprobs], PackedLogprobs] = msgspec.msgpack.Encoder().encode
unpack_logprobs: Callable[[PackedLogprobs], TokenLogprobs] = msgspec.msgpack.Decoder(TokenLogprobs).decode
