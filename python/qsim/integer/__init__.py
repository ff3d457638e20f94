"""Integer-exact evaluation: what a runtime's integer kernels compute, bit for bit (docs/integer.md)."""
