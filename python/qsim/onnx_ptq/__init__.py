"""Post-training quantization of ONNX models, where there is no Python model: observed in ONNX Runtime, ranges by our observers."""
