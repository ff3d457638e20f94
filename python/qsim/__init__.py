"""qsim: what int8, int4, fp16 and fp8 will do to a PyTorch model, seen before it is deployed."""

from qsim import ops, reference
from qsim._library import cpu_capability
from qsim.clinic import Diagnosis, Finding, doctor
from qsim.clinic.plan import Plan
from qsim.config import Config
from qsim.deploy.borders import Borders
from qsim.deploy.export_report import ExportReport
from qsim.encoding import Encoding
from qsim.errors import AccumulatorError, CalibrationError, CaptureError, ExportError, FileFormatError, NoEncodingError
from qsim.files import EncodingFile, load_encodings, save_encodings
from qsim.ops import round_to_format
from qsim.override import Override, SiteInfo
from qsim.presets import bf16, fp8, fp16, int4, int8, int16, w4a8
from qsim.profile import Profile
from qsim.quantizers.format_counts import FormatCounter, FormatCounts
from qsim.quantizers.observer import Counts, Observer
from qsim.quantizers.quantizer import Quantizer
from qsim.report.comparison import Comparison
from qsim.report.numeric_log_file import NumericLog, read_numeric_log
from qsim.report.numeric_logger import numeric_log
from qsim.report.progressive import Progressive
from qsim.report.sensitivity import Sensitivity
from qsim.report.summary import Summary
from qsim.sim.calibration import CalibrationReport
from qsim.sim.fallback_report import FallbackReport
from qsim.sim.quantsim import QuantSim
from qsim.spec import TensorSpec
from qsim.training.batch_norm import FoldReport, fold_batch_norms
from qsim.training.clip_grad import ClipReport, clip_grad_norm_
from qsim.training.schedule import Schedule
from qsim.training.watch import Event, NonFiniteError, Watch

__version__ = "0.1.0"

__all__ = [
    "AccumulatorError",
    "Borders",
    "CalibrationError",
    "CalibrationReport",
    "CaptureError",
    "ClipReport",
    "Comparison",
    "Config",
    "Counts",
    "Diagnosis",
    "Encoding",
    "EncodingFile",
    "Event",
    "ExportError",
    "ExportReport",
    "FallbackReport",
    "FileFormatError",
    "Finding",
    "FoldReport",
    "FormatCounter",
    "FormatCounts",
    "NoEncodingError",
    "NonFiniteError",
    "NumericLog",
    "Observer",
    "Override",
    "Plan",
    "Profile",
    "Progressive",
    "QuantSim",
    "Quantizer",
    "Schedule",
    "Sensitivity",
    "SiteInfo",
    "Summary",
    "TensorSpec",
    "Watch",
    "bf16",
    "clip_grad_norm_",
    "cpu_capability",
    "doctor",
    "fold_batch_norms",
    "fp8",
    "fp16",
    "int4",
    "int8",
    "int16",
    "load_encodings",
    "numeric_log",
    "ops",
    "read_numeric_log",
    "reference",
    "round_to_format",
    "save_encodings",
    "w4a8",
]
