#!/usr/bin/env bash
# Compares what libqsim_ops_cuda.so leaves undefined after linking against a CPU torch with the committed list of symbols that a
# CUDA torch provides (scripts/cuda_symbols.txt). A name outside the list would fail only on a GPU machine, at import.
set -euo pipefail
library=$(realpath "$1")
cd "$(dirname "$0")"
undefined=$(nm -uC "$library" | sed -E 's/^ +[Uw] //' | grep -E '^c10::cuda::' | sort -u)
unknown=$(comm -23 <(echo "$undefined") <(sort -u cuda_symbols.txt))
if [ -n "$unknown" ]; then
  printf 'not in scripts/cuda_symbols.txt (does libc10_cuda.so export it?):\n%s\n' "$unknown" >&2
  exit 1
fi
echo "CUDA symbols: $(echo "$undefined" | wc -l) undefined, all known"
