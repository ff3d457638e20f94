#!/usr/bin/env bash
# The libraries of operators export nothing of their own: torch finds operators through its registry. What is exported could be taken
# for the same name in another build of qsim in the process.
set -euo pipefail
for library in "$@"; do
  exported=$(nm -DC --defined-only "$library" | grep -E '\bqsim::' || true)
  if [ -n "$exported" ]; then
    printf '%s exports (set the visibility of its target to hidden):\n%s\n' "$library" "$exported" >&2
    exit 1
  fi
  echo "$(basename "$library") exports nothing of qsim"
done
