"""Writing, reading and checking ONNX models."""
