"""GPU kernels in Triton. With ``TRITON_INTERPRET=1``, set before the import, they run slowly on the CPU, for tests."""

import os


def has_interpreter() -> bool:
    """Whether kernels that are imported now run in the interpreter, on tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "y", "yes", "true", "on")
