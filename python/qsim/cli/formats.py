"""Formats that `qsim convert` writes."""

from qsim import checkpoints, files

FORMATS = (*files.FORMATS, *checkpoints.FORMATS)
