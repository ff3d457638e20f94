#!/usr/bin/env bash
# Compiles the kernels and their C++ tests for 64-bit ARM, without a warning, and runs the tests under qemu (user mode). Wants
# g++-aarch64-linux-gnu, qemu-user and catch2 (Debian, Ubuntu: names of packages). No torch. qemu computes as the processor does;
# what it says of speed is nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v $tool >/dev/null || { echo "no $tool: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 2; }
done
scripts/require_catch2.sh
cmake -S . -B build/aarch64 -G Ninja -DQSIM_KERNELS_ONLY=ON -DQSIM_BUILD_TESTS=ON -DQSIM_WARNINGS_ARE_ERRORS=ON -DQSIM_CUDA=OFF \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu" >/dev/null
cmake --build build/aarch64
ctest --test-dir build/aarch64 --output-on-failure -j 2
