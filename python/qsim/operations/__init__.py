"""What torch's functions and ONNX's types are, as data; and operations written out, or in half precision."""
