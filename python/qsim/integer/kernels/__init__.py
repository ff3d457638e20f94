"""ONNX Runtime's integer kernels in plain torch, exact on every device.

One module per family. Each function documents its arithmetic: which roundings there are, in which order. They are those of x86-64
with AVX2 and FMA; where others differ, the function says so. Nothing here knows graphs or modules.
"""
