"""Quantizers, observers and what they are made of, usable alone."""
