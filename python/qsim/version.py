"""The version of qsim, for what it writes into files."""

VERSION = "0.1.0"
