"""The reference backend: every op in plain numpy, every stored format decoded, every sampling rule spelled out.

It is the oracle of the native kernels and of the native sampler, and it runs models that no kernel knows yet. Called by
tests, and by `engine` when asked for by name. It never knows of requests, schedulers or text, and it never tries to be
fast at the price of being less plain.
"""

from tailrace.backends.reference.backend import ReferenceBackend
from tailrace.backends.reference.dequantize import dequantize
from tailrace.backends.reference.sampler import gumbel, sample

__all__ = ["ReferenceBackend", "dequantize", "gumbel", "sample"]
