"""Fixtures of tests of the engine."""

import pytest
from support.engine.native_targets import USABLE

from common.engine.cpu.compile_native import BuildError
from common.engine.cpu.kernels import Kernels, open_kernels


@pytest.fixture(scope="module", params=USABLE, ids=lambda target: target.name)
def compiled(request: pytest.FixtureRequest) -> Kernels:
    """The kernels of each target that this processor can run."""
    try:
        return open_kernels(request.param)
    except BuildError as error:
        pytest.skip(str(error))
