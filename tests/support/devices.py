"""The devices that engine tests run on: the CPU everywhere, CUDA where there is one."""

import pytest

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.cuda)]
