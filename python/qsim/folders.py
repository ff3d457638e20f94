"""Where torch's files and our own lie: by this a line of the user's program is told from others."""

import os

import torch

TORCH, QSIM = (os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, __file__))
