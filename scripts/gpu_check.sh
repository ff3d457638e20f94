#!/usr/bin/env bash
# Everything that only a GPU machine can tell, in one go, without network, in less than ten minutes:
#   scripts/gpu_check.sh [output directory]          (default: out/gpu_check)
# Wants nvcc, cmake, g++ and an interpreter ($PYTHON, default python3) with a CUDA torch and pytest. Ninja is used where it is, the
# C++ tests where Catch2 is. A failing step does not stop the others; report.json holds every step's exit status, seconds and last
# lines, and the benchmarks. Exit status: 0 all passed, 1 a step failed, 2 this machine cannot run the check.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-out/gpu_check}" && realpath "${1:-out/gpu_check}") || exit 2
exec "${PYTHON:-python3}" scripts/gpu_check.py "$out"
