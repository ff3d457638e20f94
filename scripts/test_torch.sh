#!/usr/bin/env bash
# qsim built for another torch or Python than that of .venv, and all Python tests against it:
#   scripts/test_torch.sh [torch requirement, default torch==2.14.1] [pytest arguments]
# $PYTHON is the interpreter (default python3). A plain `torch==2.14.1` is a CUDA build, and where no GPU is that is the commonest
# install there is: with nvcc, libqsim_ops_cuda.so is compiled and linked against it for real, the tests that a GPU would run are built
# too, and tests/python/ops/test_cuda_registered.py asks whether every operator has its kernel there. It takes some GB of disk.
# $QSIM_CUDA_ARCHITECTURES: as CMake has them (default: those that are tuned). Afterwards the package lies in build/<name>/site.
set -euo pipefail
cd "$(dirname "$0")/.."
requirement=${1:-torch==2.14.1}
shift $(($# > 0))
python=${PYTHON:-python3}
name=${requirement/==/-}-py$("$python" -c 'import sys; print("{}.{}".format(*sys.version_info))')
name=${name//[^A-Za-z0-9._+-]/-}
environment=.venv-$name build=build/$name site=$PWD/build/$name/site
bin=$PWD/$environment/bin
export PATH="$bin:$PATH"

if [ ! -e "$environment/ready" ]; then
  "$python" -m venv "$environment"
  "$bin/pip" install --quiet --upgrade "pip>=25.1"
  "$bin/pip" install --quiet "$requirement"
  "$bin/pip" freeze | grep '^torch==' > "$environment/constraint"
  "$bin/pip" install --quiet --constraint "$environment/constraint" --group dev
  touch "$environment/ready"
fi

cuda=$("$bin/python" -c 'import torch; print(torch.version.cuda or "")')
nvcc=${NVCC:-$(command -v nvcc || ls /usr/local/cuda*/bin/nvcc 2>/dev/null | tail -n 1 || true)}
configure=(cmake -S . -B "$build" -G Ninja "-DPython_EXECUTABLE=$bin/python" -DQSIM_CUDA=OFF) targets=(qsim_ops qsim_python)
if [ -n "$cuda" ] && [ -n "$nvcc" ]; then
  scripts/require_catch2.sh
  configure+=(-DQSIM_CUDA=ON "-DCMAKE_CUDA_COMPILER=$nvcc" "-DCMAKE_CUDA_ARCHITECTURES=${QSIM_CUDA_ARCHITECTURES:-80;90}" -DQSIM_BUILD_TESTS=ON)
  targets+=(qsim_ops_cuda device_tests)
fi
"${configure[@]}" >/dev/null
cmake --build "$build" --target "${targets[@]}"
rm -rf "$site"
cmake --install "$build" --prefix "$site" >/dev/null
tar -C python -c --exclude='*.so' --exclude=_build_info.py --exclude=__pycache__ qsim | tar -C "$site" -x
if [ ${#targets[@]} -gt 1 ] && [ ! -e "$site/qsim/libqsim_ops_cuda.so" ]; then
  echo "$site/qsim has no libqsim_ops_cuda.so" >&2
  exit 1
fi
echo "$name: CUDA ${cuda:-none}, libqsim_ops_cuda.so $([ -e "$site/qsim/libqsim_ops_cuda.so" ] && echo built || echo left out)"
OMP_NUM_THREADS=1 PYTHONPATH="$site" "$bin/python" -m pytest -n 2 "$@"
