"""Exact changes of a float model's weights after which it quantizes better: scales between layers, rotations."""

from qsim.equalization.equalize import equalize
from qsim.equalization.methods import Awq, CrossLayer, SmoothQuant
from qsim.equalization.report import Change, EqualizeReport
from qsim.equalization.rotation import Rotation

__all__ = ["Awq", "Change", "CrossLayer", "EqualizeReport", "Rotation", "SmoothQuant", "equalize"]
