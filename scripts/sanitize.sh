#!/usr/bin/env bash
# The torch-free kernel tests once more under AddressSanitizer and UndefinedBehaviorSanitizer, float casts included.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake -S . -B build/sanitize -G Ninja -DQSIM_KERNELS_ONLY=ON -DQSIM_BUILD_TESTS=ON -DQSIM_WARNINGS_ARE_ERRORS=ON -DCMAKE_BUILD_TYPE=Debug \
  -DQSIM_SANITIZE=address,undefined,float-cast-overflow >/dev/null
cmake --build build/sanitize
ctest --test-dir build/sanitize --output-on-failure -j 2
