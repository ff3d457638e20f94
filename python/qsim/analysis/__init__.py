"""What quantization costs, measured: comparison, sensitivity, progressive quantization, searches."""
