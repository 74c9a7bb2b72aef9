#!/usr/bin/env bash
# Builds the native code with a test driver, without Python, and runs it under ASan + UBSan and under
# TSan. Exits non-zero on any report.
#
#   csrc/sanitize.sh [address|thread]...      default: both
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
build=$(mktemp -d)
scratch=$(mktemp -d "${TMPDIR:-/var/tmp}/sanitize.XXXXXX")  # on a disk
memory=$(mktemp -d /dev/shm/sanitize.XXXXXX)                # on tmpfs, which has no O_DIRECT
trap 'rm -rf "$build" "$scratch" "$memory"' EXIT

sources=("$here"/tests/sanitizer_driver.cpp)
for source in "$here"/*.cpp; do
  [[ $source == */bindings.cpp ]] || sources+=("$source")
done

build_and_run() {
  local name=$1 flags=$2
  shift 2
  echo "== $name"
  # shellcheck disable=SC2086
  "${CXX:-g++}" -std=c++17 -O2 -g -fno-omit-frame-pointer -Wall -Wextra -Werror $flags \
    "${sources[@]}" -o "$build/$name" -pthread -laio
  "$@" "$build/$name" "$scratch" "$memory"
}

export ASAN_OPTIONS=detect_leaks=1:halt_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1

[[ $# -gt 0 ]] || set -- address thread
for kind in "$@"; do
  case $kind in
    address) build_and_run address "-fsanitize=address,undefined -fno-sanitize-recover=all" ;;
    # Without address randomisation: older runtimes die with "unexpected memory mapping".
    thread) build_and_run thread -fsanitize=thread setarch "$(uname -m)" -R ;;
    *)
      echo "usage: $0 [address|thread]..." >&2
      exit 2
      ;;
  esac
done
