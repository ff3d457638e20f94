"""Checkpoints with packed integer weights: GPTQ, AWQ, compressed-tensors, GGUF."""

from qsim.checkpoints.checkpoint import Checkpoint
from qsim.checkpoints.formats import FORMATS, load_checkpoint, save_checkpoint
from qsim.checkpoints.packed_weight import PackedWeight

__all__ = ["FORMATS", "Checkpoint", "PackedWeight", "load_checkpoint", "save_checkpoint"]
