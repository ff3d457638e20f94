#!/usr/bin/env bash
# Compiles the CUDA kernels for every architecture that nvcc 13 knows and torch is built for, or for those that are named:
# scripts/compile_cuda.sh [75 80 ...]. Nothing is kept, little is optimised and the host's code is left out, which takes two
# minutes on two cores: what is asked is whether each architecture has what the kernels use. Speed and spills are QSIM_CUDA=CHECK's, for
# the two that are tuned.
set -euo pipefail
cd "$(dirname "$0")/../kernels/cuda"
nvcc=${NVCC:-$(command -v nvcc || ls /usr/local/cuda*/bin/nvcc 2>/dev/null | tail -n 1 || true)}
if [ -z "$nvcc" ]; then
  echo "no nvcc: name one with NVCC=..." >&2
  exit 2
fi
architectures=("$@")
[ $# -gt 0 ] || architectures=(75 80 86 87 89 90 100 103 120)
flags=(-std=c++20 -I ../include --expt-relaxed-constexpr -fmad=false -Xcicc -O1 -Xptxas -O0)
for architecture in "${architectures[@]}"; do flags+=(-gencode "arch=compute_$architecture,code=sm_$architecture"); done
flags+=(-fatbin -o /dev/null)
export nvcc
printf '%s\0' *.cu | xargs -0 -P 2 -I '{}' sh -c '"$nvcc" "$@" "{}" || { echo "failed: {}" >&2; exit 255; }' compile "${flags[@]}"
echo "CUDA kernels: all of $(ls -- *.cu | wc -l) files compile for sm_${architectures[*]}"
