"""Where NaN, Inf and lost accuracy come from, found in PyTorch before a runtime is asked: `qsim.doctor`."""

from qsim.clinic.diagnosis import Diagnosis
from qsim.clinic.examine import doctor
from qsim.clinic.finding import Finding
from qsim.clinic.targets import TARGETS, Target

__all__ = ["TARGETS", "Diagnosis", "Finding", "Target", "doctor"]
