"""What `import qsim` offers: read by type checkers, and by `__init__.py`, which imports each name from here when it is first asked for."""

from qsim import ops, reference
from qsim._library import cpu_capability
from qsim.analysis.bit_costs import Budget
from qsim.analysis.bit_search_report import BitSearch
from qsim.analysis.comparison import Comparison
from qsim.analysis.numeric_log_file import NumericLog, read_numeric_log
from qsim.analysis.numeric_logger import numeric_log
from qsim.analysis.progressive import Progressive
from qsim.analysis.sensitivity import Sensitivity
from qsim.batch_norm.fold import fold_batch_norms
from qsim.batch_norm.fold_report import FoldReport
from qsim.checkpoints import Checkpoint, PackedWeight, load_checkpoint, save_checkpoint
from qsim.clinic import Diagnosis, Finding, doctor
from qsim.config.config import Config
from qsim.config.override import Override, SiteInfo
from qsim.config.presets import (
    bf16,
    fp8,
    fp8_block,
    fp8_dynamic,
    fp8_static,
    fp16,
    int4,
    int8,
    int16,
    mxfp4,
    mxfp8,
    nvfp4,
    w4a8,
    w4a16,
    w8a8_dynamic,
    w8a8_static,
)
from qsim.config.profile import Profile
from qsim.deploy.engine_plan import Plan
from qsim.deploy.export_report import ExportReport
from qsim.deploy.verification import Verification
from qsim.equalization import EqualizeReport, equalize
from qsim.errors import AccumulatorError, CalibrationError, CaptureError, ExportError, FileFormatError, NoEncodingError
from qsim.files import EncodingFile, Entry, load_encodings, save_encodings
from qsim.integer.assignment import Kernel
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec
from qsim.onnx_ptq.quantize_onnx import OnnxQuantized, quantize_onnx
from qsim.ops import round_to_format
from qsim.quantizers.observer import Observer
from qsim.quantizers.quantizer import Quantizer
from qsim.quantsim.quantize_to_goal import Quantized, quantize
from qsim.quantsim.quantsim import QuantSim
from qsim.restoration.distill import Distilled
from qsim.restoration.restore_report import RestoreReport
from qsim.simulation.borders import Borders
from qsim.simulation.calibration import CalibrationReport
from qsim.simulation.fallback_report import FallbackReport
from qsim.simulation.summary import Summary
from qsim.training.clip_grad import ClipReport, clip_grad_norm_
from qsim.training.monitor import Monitor
from qsim.training.schedule import Schedule
from qsim.training.watch import NonFiniteError, Watch

__version__: str

__all__ = [  # noqa: RUF022
    # simulate a model
    "QuantSim",
    "doctor",
    "equalize",
    "fold_batch_norms",
    "quantize",
    "quantize_onnx",
    # what to quantize, and how
    "Budget",
    "Config",
    "Override",
    "Plan",
    "Profile",
    "SiteInfo",
    "TensorSpec",
    "bf16",
    "fp8",
    "fp8_block",
    "fp8_dynamic",
    "fp8_static",
    "fp16",
    "int4",
    "int8",
    "int16",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "w4a8",
    "w4a16",
    "w8a8_dynamic",
    "w8a8_static",
    # parts, usable alone
    "Encoding",
    "Observer",
    "Quantizer",
    # operators
    "ops",
    "reference",
    "round_to_format",
    # files
    "Checkpoint",
    "EncodingFile",
    "Entry",
    "NumericLog",
    "PackedWeight",
    "load_checkpoint",
    "load_encodings",
    "numeric_log",
    "read_numeric_log",
    "save_checkpoint",
    "save_encodings",
    # training
    "ClipReport",
    "FoldReport",
    "Monitor",
    "Schedule",
    "Watch",
    "clip_grad_norm_",
    # what reports are
    "BitSearch",
    "Borders",
    "CalibrationReport",
    "Comparison",
    "Diagnosis",
    "Distilled",
    "EqualizeReport",
    "ExportReport",
    "FallbackReport",
    "Finding",
    "Kernel",
    "OnnxQuantized",
    "Progressive",
    "Quantized",
    "RestoreReport",
    "Sensitivity",
    "Summary",
    "Verification",
    # errors
    "AccumulatorError",
    "CalibrationError",
    "CaptureError",
    "ExportError",
    "FileFormatError",
    "NoEncodingError",
    "NonFiniteError",
    # this installation
    "__version__",
    "cpu_capability",
]
