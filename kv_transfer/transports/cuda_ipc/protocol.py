"""What a reader tells a writer about its pool: bytes of fixed size, decoded strictly."""

import struct
from dataclasses import astuple, dataclass

from kv_transfer.transports.cuda_ipc.driver import HANDLE_BYTES, UUID_BYTES

NONCE_BYTES = 32
#: Writers that try out their attachments at the same time write into areas of their own.
NUM_ECHO_AREAS = 256
#: The probe memory: what the reader tells, and the areas.
PROBE_BYTES = NONCE_BYTES * (1 + NUM_ECHO_AREAS)
_SHARED_POOL = struct.Struct(f"<{UUID_BYTES}s{HANDLE_BYTES}sQ{HANDLE_BYTES}s{NONCE_BYTES}sI")


@dataclass(frozen=True, slots=True)
class SharedPool:
    """A pool as others can open it.

    Attributes:
        device: UUID of the GPU.
        pool: handle of the allocation that contains the pool.
        offset: of the pool in it, in bytes.
        probe: handle of the memory for probes.
        nonce: what stands at its beginning.
        area: number of the area for this writer.
    """

    device: bytes
    pool: bytes
    offset: int
    probe: bytes
    nonce: bytes
    area: int

    def encode(self) -> bytes:
        return _SHARED_POOL.pack(*astuple(self))

    @classmethod
    def decode(cls, pool_info: bytes) -> "SharedPool":
        """Raises ValueError: it has another length."""
        try:
            return cls(*_SHARED_POOL.unpack(pool_info))
        except struct.error as error:
            raise ValueError(f"{len(pool_info)} bytes instead of {_SHARED_POOL.size}") from error


def echo_offset(area: int) -> int:
    """Where in the probe memory a writer tries out its attachment."""
    return NONCE_BYTES * (1 + area % NUM_ECHO_AREAS)
