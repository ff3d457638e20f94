"""Checkpoints with packed weights: GPTQ, AWQ, compressed-tensors, FP8, GGUF."""

from qsim.checkpoints.checkpoint import Checkpoint
from qsim.checkpoints.checkpoint_formats import CHECKPOINT_FORMATS, first_names, load_checkpoint, place_of, save_checkpoint, write_packed
from qsim.checkpoints.packed_weight import PackedWeight

__all__ = [
    "CHECKPOINT_FORMATS",
    "Checkpoint",
    "PackedWeight",
    "first_names",
    "load_checkpoint",
    "place_of",
    "save_checkpoint",
    "write_packed",
]
