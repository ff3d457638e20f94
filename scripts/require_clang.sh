#!/usr/bin/env bash
# `make fuzz` wants a clang++ with libFuzzer: the system's package, installed when root.
set -euo pipefail
if ls /usr/bin/clang++* >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  (apt-get update -qq && apt-get install -y -qq clang) >/dev/null 2>&1 && exit 0
fi
echo "clang++ with libFuzzer is not installed (Debian, Ubuntu: sudo apt-get install clang)" >&2
exit 1
