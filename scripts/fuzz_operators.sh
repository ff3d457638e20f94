#!/usr/bin/env bash
# Random calls of every operator (tests/python/operator_fuzz) with the library built with AddressSanitizer and UndefinedBehaviorSanitizer,
# at every instruction-set level: scripts/fuzz_operators.sh [calls [seed]]. Wants an environment with torch on PATH, and g++.
set -euo pipefail
cd "$(dirname "$0")/.."
calls=${1:-1000000} seed=${2:-$RANDOM}
build=build/operators
cmake -S . -B $build -G Ninja -DQSIM_CUDA=OFF -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_COMPILER=g++ "-DPython_EXECUTABLE=$(command -v python)" \
  -DQSIM_SANITIZE=address,undefined,float-cast-overflow >/dev/null
cmake --build $build
mkdir -p $build/python
cp -r python/qsim $build/python/
cmake --install $build --prefix $build/python >/dev/null
# Python itself is not sanitized: the runtimes have to be there before it, and libstdc++ before them for exceptions to be seen.
runtimes=$(for name in libasan.so libubsan.so libstdc++.so; do g++ -print-file-name=$name; done | tr '\n' ' ')
sanitized() {
  LD_PRELOAD="$runtimes" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1 \
    PYTHONPATH="$build/python:tests/python" QSIM_CPU_CAPABILITY=$1 python -W ignore "${@:2}"
}
for level in default avx2 avx512; do
  if ! sanitized $level -c 'import qsim; qsim.cpu_capability()' 2>/dev/null; then
    echo "skipped: this machine cannot run level $level"
    continue
  fi
  echo "level $level"
  if ! sanitized $level -m operator_fuzz --calls $((calls / 3)) --seed "$seed" --trace $build/trace; then
    echo "the call: python -m operator_fuzz --seed $seed --only $(cat $build/trace)" >&2
    exit 1
  fi
done
