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

_FEATURES = processor_features()
_NATIVE = [target for target in TARGETS if target.features <= _FEATURES]
_EMULATED_AMX = [EMULATED_AMX] if EMULATED_AMX.features <= _FEATURES else []

#: For results. AMX is emulated only where the processor lacks it.
USABLE = _NATIVE + ([] if TARGETS[0] in _NATIVE else _EMULATED_AMX) or [NATIVE]
#: For sanitizers, which see what C functions read and write, and not what the instructions of AMX do.
SANITIZED = [target for target in _NATIVE if target is not TARGETS[0]] + _EMULATED_AMX or [NATIVE]
