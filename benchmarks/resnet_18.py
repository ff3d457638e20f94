"""The shapes of a ResNet-18's parameters: sizes as models have them."""

from __future__ import annotations

ELEMENTS = 11_689_512  # in 62 tensors


def shapes() -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width in [64, 128, 256, 512]:
        for inputs in [before, width, width, width]:
            found += [(width, inputs, 3, 3), (width,), (width,)]
        if width != before:
            found += [(width, before, 1, 1), (width,), (width,)]
        before = width
    return [*found, (1000, 512), (1000,)]
