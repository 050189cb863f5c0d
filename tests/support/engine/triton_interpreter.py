"""Makes Triton's interpreter several times faster: it prepares ``triton.language`` once for each launch.

By itself it does so again for every call between two functions of a kernel. Importing this module is enough.
"""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

from common.engine.triton_kernels import has_interpreter

_patch_kernel: Any = interpreter._patch_lang


def _patch(function: Any) -> Any:
    """Prepare the modules that a kernel calls, and those that the standard library of Triton calls."""
    scope = _patch_kernel(function)
    standard: Any = tl.max
    scope._changes += _patch_kernel(standard.fn)._changes
    return scope


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.rewrite()(*args, **kwargs)


if has_interpreter():
    interpreter._patch_lang = _patch
    interpreter.InterpretedFunction.__call__ = _call  # type: ignore[method-assign]
