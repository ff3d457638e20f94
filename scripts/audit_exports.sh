#!/usr/bin/env bash
# The libraries of operators export nothing of their own: torch finds operators through its registry. What is exported could be taken
# for the same name in another build of qsim in the process. A module of Python exports what Python calls, and nothing else.
set -euo pipefail
for library in "$@"; do
  case "$(basename "$library")" in
    _C.*) allowed=' T PyInit__C$' pattern='' ;;
    *) allowed='^$' pattern='\bqsim::' ;;
  esac
  exported=$(nm -DC --defined-only "$library" | grep -E "$pattern" | grep -vE "$allowed" || true)
  if [ -n "$exported" ]; then
    printf '%s exports (set the visibility of its target to hidden):\n%s\n' "$library" "$exported" >&2
    exit 1
  fi
  echo "$(basename "$library") exports nothing of qsim but what it has to"
done
