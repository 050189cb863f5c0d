"""The targets that the kernels can be compiled for, and that the processor of the tests has."""

import hashlib
from pathlib import Path

from common.engine.cpu.targets import NATIVE, TARGETS, Target, processor_features

_BF16 = next(target for target in TARGETS if target.name == "avx512-bf16")
_EMULATED = Path(__file__).with_name("emulated_tiles.h")
_VERSION = hashlib.sha256(_EMULATED.read_bytes()).hexdigest()[:8]  # a compiled library is found again by its flags
#: AMX with its instructions as C functions.
EMULATED_AMX = Target(
    "amx-emulated", _BF16.features, (*_BF16.flags, f"-DEMULATED_{_VERSION}", "-include", str(_EMULATED))
)

USABLE = [target for target in (*TARGETS, EMULATED_AMX) if target.features <= processor_features()] or [NATIVE]
