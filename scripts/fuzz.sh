#!/usr/bin/env bash
# Builds the libFuzzer targets with clang and runs each on so many inputs: scripts/fuzz.sh [inputs] [target ...]. Sanitizers are on.
set -euo pipefail
cd "$(dirname "$0")/.."
inputs=${1:-1000000}
shift || true
clang=$({ ls /usr/bin/clang++ /usr/bin/clang++-[0-9]* 2>/dev/null || true; } | sort -V | tail -n 1)
if [ -z "$clang" ]; then
  echo "skipped: no clang++ with libFuzzer (Debian, Ubuntu: apt-get install clang); random inputs were run by ctest" >&2
  exit 0
fi
cmake -S . -B build/fuzz -G Ninja -DQSIM_KERNELS_ONLY=ON -DQSIM_BUILD_TESTS=ON "-DCMAKE_CXX_COMPILER=$clang" \
  -DQSIM_SANITIZE=fuzzer-no-link,address,undefined,float-cast-overflow >/dev/null
cmake --build build/fuzz --target fuzz_targets
for target in "${@:-$(cd tests/fuzz && ls -- *_fuzz.cpp)}"; do
  for name in $target; do
    name=${name%.cpp}
    build/fuzz/tests/fuzz/$name -runs="$inputs" -seed=1 -verbosity=0 -timeout=60 -artifact_prefix="build/fuzz/$name-"
    echo "$name: $inputs inputs, no difference"
  done
done
