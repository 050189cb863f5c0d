"""Fixtures of tests of the engine."""

import pytest
from support.engine.native_targets import USABLE

from common.engine.cpu.compile_native import BuildError
from common.engine.cpu.kernels import Kernels, open_kernels

#: Without ``--all``, only the kernels that nodes use on this processor.
TARGETS = [USABLE[0], *(pytest.param(target, marks=pytest.mark.slow(sample=0)) for target in USABLE[1:])]


@pytest.fixture(scope="module", params=TARGETS, ids=lambda target: target.name)
def compiled(request: pytest.FixtureRequest) -> Kernels:
    """The kernels of each target that this processor can run."""
    try:
        return open_kernels(request.param)
    except BuildError as error:
        pytest.skip(str(error))
