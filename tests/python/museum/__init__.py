"""A museum of numeric failures that people reported: one tiny model for each, and a healthy one of the same kind.

Each exhibit is a function whose docstring tells what was reported, and where. Nothing of the reported models is in it but the arithmetic
that fails.
"""

from museum import accumulators, attention, epsilons, float32, heads, integers, norms, sums  # noqa: F401
from museum.exhibit import EXHIBITS as EXHIBITS
