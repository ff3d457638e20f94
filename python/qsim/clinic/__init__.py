"""Where NaN, Inf and lost accuracy come from, found in PyTorch before a runtime is asked."""
