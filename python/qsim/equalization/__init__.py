"""Exact changes of a float model's weights after which it quantizes better: scales between layers, rotations."""

from qsim.equalization.absorption import BiasAbsorption
from qsim.equalization.equalize import equalize
from qsim.equalization.equalize_report import Change, EqualizeReport
from qsim.equalization.rotation import Rotation
from qsim.equalization.scale_methods import Awq, CrossLayer, SmoothQuant

__all__ = ["Awq", "BiasAbsorption", "Change", "CrossLayer", "EqualizeReport", "Rotation", "SmoothQuant", "equalize"]
