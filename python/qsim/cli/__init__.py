"""The command line: ``qsim inspect``, ``convert``, ``quantize``, ``compare``, ``verify``, ``doctor`` and ``completion``, a module each."""

from qsim.cli.main import main

__all__ = ["main"]
