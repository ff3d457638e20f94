"""The command line: ``qsim inspect``, ``convert``, ``verify`` and ``doctor``, a module each."""

from qsim.cli.main import main

__all__ = ["main"]
