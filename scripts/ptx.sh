#!/usr/bin/env bash
# Runs the PTX of the CUDA kernels, as nvcc makes it, against the CPU kernels (tests/ptx): for the oldest architecture, for those that
# are tuned and for the newest, whose code differs. The build of `make test` does so for one. Wants nvcc; no GPU, no torch.
set -euo pipefail
cd "$(dirname "$0")/.."
nvcc=${NVCC:-$(command -v nvcc || ls /usr/local/cuda*/bin/nvcc 2>/dev/null | tail -n 1 || true)}
if [ -z "$nvcc" ]; then
  echo "no nvcc: name one with NVCC=..." >&2
  exit 2
fi
cmake -S . -B build/ptx -G Ninja -DQSIM_KERNELS_ONLY=ON -DQSIM_BUILD_TESTS=ON -DQSIM_WARNINGS_ARE_ERRORS=ON -DQSIM_CUDA=CHECK \
  "-DCMAKE_CUDA_COMPILER=$nvcc" "-DQSIM_PTX_ARCHITECTURES=75;80;90;100;120" >/dev/null
cmake --build build/ptx --target ptx_tests
ctest --test-dir build/ptx --output-on-failure -R '^ptx' -j 2
