"""Launches of Triton kernels that take the host a fraction of the time of Triton's own.

Triton looks at each argument of every launch to find the code that it has compiled for such arguments. That takes
longer than most kernels run: a step whose kernels are launched one by one waited for the host.
"""

from functools import partial
from typing import Any

import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

#: Kinds of launches of one kernel that are remembered.
MAX_REMEMBERED = 1024


class FastLaunch:
    """A kernel, decorated: ``kernel[grid](*args, **options)`` launches it as before.

    Triton compiles for the types of all arguments, for constants, for pointers that are multiples of 16 and for some
    values of integers. Where all these are as in an earlier launch, the code of that launch runs. Positional arguments
    are tensors and numbers; constants and the compiler's options are named.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._is_compiled = isinstance(kernel, JITFunction)  # else Triton's interpreter runs it
        self._launched: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid) if self._is_compiled else self._kernel[grid]

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        kinds = [
            (arg.dtype, arg.data_ptr() % 16 == 0) if isinstance(arg, torch.Tensor) else (type(arg), arg) for arg in args
        ]
        key = (driver.active.get_current_device(), *kinds, *options.items())
        if found := self._launched.get(key):
            compiled, constants = found
            compiled[(*grid, 1, 1)](*args, *constants)
            return
        compiled = self._kernel[grid](*args, **options)
        if compiled is not None:
            if len(self._launched) >= MAX_REMEMBERED:
                self._launched.clear()
            constants = tuple(options[name] for name in self._kernel.arg_names[len(args) :])
            self._launched[key] = (compiled, constants)
