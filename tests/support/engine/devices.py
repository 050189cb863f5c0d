"""The devices of the engine tests: the CPU, and CUDA on machines that have it."""

import pytest

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.cuda)]
