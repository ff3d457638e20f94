"""ExecuTorch: a traced simulation as the quantized graph that its backends read, lowered to XNNPACK, run."""
