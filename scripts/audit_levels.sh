#!/usr/bin/env bash
# Every object compiled for one instruction-set level may export its constant tables and nothing else: an exported function compiled
# for AVX-512 could be picked by the linker for every level.
set -euo pipefail
build=$1
bad=$(find "$build/kernels" -path '*qsim_kernels_*' -name '*.cpp.o' -exec nm -C --print-file-name {} + | grep -E ' [TWVuDB] ' | grep -vE ' D qsim::cpu::[a-z0-9]+::[a-z0-9_]+_kernels$' || true)
if [ -n "$bad" ]; then
  printf 'exported from a per-level object (only constant tables may be):\n%s\n' "$bad" >&2
  exit 1
fi
# Tables of lower levels may be read: what runs a level runs those below.
tables='_ZN4qsim3cpu2v[23][0-9]+[a-z0-9_]+_kernelsE'
# A function per element: what the level has no instruction for must not become a call. These are called once per tensor or bin.
known="$tables|frexp|ldexp|log|memcpy|memmove|memset|nextafter|nextafterf|pow|__(asan|ubsan|stack_chk).*|_GLOBAL_OFFSET_TABLE_"
called=$(find "$build/kernels" -path '*qsim_kernels_*' -name '*.cpp.o' -exec nm -u {} + | awk '$1 == "U" {print $2}' | sort -u | grep -vxE "$known" || true)
if [ -n "$called" ]; then
  printf 'called from a per-level object (a libm call inside a loop?):\n%s\n' "$called" >&2
  exit 1
fi
echo "per-level objects export constant tables only and call no unexpected function"
