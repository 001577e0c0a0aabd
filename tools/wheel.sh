#!/bin/bash
# Builds the Python wheel (python/pyproject.toml) into a folder.
#   tools/wheel.sh [OUT]         OUT: dist
# FW_PYTHON: the Python whose pip builds it (python3); FW_WHEEL_CUDA: AUTO (device code where nvcc is), ON, OFF. Object files stay in
# build-wheel (without CUDA: build-wheel-cpu) for the next time.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/dist}
# With device code where there is a compiler for it: a wheel is for other machines.
cuda=${FW_WHEEL_CUDA:-$(if command -v nvcc > /dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then echo ON; else echo OFF; fi)}
build=$root/build-wheel
[ "$cuda" != OFF ] || build=$root/build-wheel-cpu
export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$root}
"${FW_PYTHON:-python3}" -m pip -q --disable-pip-version-check wheel --no-deps -w "$out" "$root/python" \
  --config-settings=cmake.define.FW_CUDA="$cuda" --config-settings=cmake.define.FW_UNITY=ON --config-settings=build-dir="$build"
ls -l "$out"/fastweight-*.whl
