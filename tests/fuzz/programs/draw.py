"""Draws by name."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping


def drawn(rng: random.Random, weights: Mapping[str, float]) -> str:
    """One of the names, each as often as its weight says.

    A name more is drawn in the places of others, and changes nothing else: what is added to a table leaves most programs as they are.
    """
    token = rng.getrandbits(64)

    def waits(name: str) -> float:
        digest = hashlib.blake2b(f"{token} {name}".encode(), digest_size=8).digest()
        return -math.log((int.from_bytes(digest, "big") + 1) / 2**64) / weights[name]

    return min((name for name in weights if weights[name] > 0), key=waits)
