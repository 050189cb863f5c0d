"""The targets that the kernels can be compiled for, and that the processor of the tests has."""

from common.engine.cpu.targets import NATIVE, TARGETS, processor_features

USABLE = [target for target in TARGETS if target.features <= processor_features()] or [NATIVE]
