"""Formats that `qsim convert` writes."""

from qsim import checkpoints, files

WRITABLE_FORMATS = (*files.FORMATS, *checkpoints.CHECKPOINT_FORMATS)
