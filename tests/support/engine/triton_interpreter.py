"""Makes Triton's interpreter several times faster: it prepares ``triton.language`` once for each launch.

By itself it does so again for every call between two functions of a kernel. Importing this module is enough.
"""

from importlib.util import find_spec
from typing import Any

from common.engine.triton_kernels import has_interpreter


def _make_faster() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    patch_kernel: Any = interpreter._patch_lang
    standard: Any = tl.max  # of the module that holds Triton's standard library

    def patch(function: Any) -> Any:
        scope = patch_kernel(function)
        scope._changes += patch_kernel(standard.fn)._changes
        return scope

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function.rewrite()(*args, **kwargs)

    interpreter._patch_lang = patch
    interpreter.InterpretedFunction.__call__ = call  # type: ignore[method-assign]


if has_interpreter() and find_spec("triton"):
    _make_faster()
