"""Files of encodings: qsim's own, AIMET's, TensorRT's calibration caches; and what ONNX Runtime and Core ML take in memory."""

from qsim.files.coreml_hints import read_coreml_hints, with_coreml_hints, without_coreml_hints
from qsim.files.encoding_file import EncodingFile, Entry, Source
from qsim.files.formats import FORMATS, load_encodings, save_encodings
from qsim.files.tensor_quant_overrides import from_tensor_quant_overrides, tensor_quant_overrides

__all__ = [
    "FORMATS",
    "EncodingFile",
    "Entry",
    "Source",
    "from_tensor_quant_overrides",
    "load_encodings",
    "read_coreml_hints",
    "save_encodings",
    "tensor_quant_overrides",
    "with_coreml_hints",
    "without_coreml_hints",
]
