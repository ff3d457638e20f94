"""Numbers and grids: float formats, blocks, what a tensor is to be quantized to, and what it was."""
