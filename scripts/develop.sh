#!/usr/bin/env bash
# Builds the operators and the C++ tests into build/dev and installs them beside the Python sources: python/qsim becomes importable
# with PYTHONPATH=python. Arguments go to cmake, e.g. -DQSIM_CUDA=CHECK. Wants an environment with torch on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake -S . -B build/dev -G Ninja -DQSIM_BUILD_TESTS=ON -DQSIM_WARNINGS_ARE_ERRORS=ON "-DPython_EXECUTABLE=$(command -v python)" "$@" >/dev/null
cmake --build build/dev
cmake --install build/dev --prefix python >/dev/null
