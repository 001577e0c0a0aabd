#!/bin/sh
# Brings CUDA's compiler and cuBLAS (tools/cuda-wheels.txt: 1 GB unpacked) into the user's cache, for a machine that has an NVIDIA driver and
# no CUDA toolkit. Nothing of the system changes and root is not needed. Does nothing where the cache has them already.
#   tools/install-cuda.sh            prints the folder of the toolkit
#   FW_CUDA_CACHE=DIR                in place of ~/.cache/fastweight/cuda-13.0
set -eu

here=$(cd "$(dirname "$0")" && pwd)
cache=${FW_CUDA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fastweight/cuda-13.0}
toolkit=$cache/nvidia/cu13
if [ -f "$cache/wheels.txt" ] && cmp -s "$here/cuda-wheels.txt" "$cache/wheels.txt"; then
  echo "$toolkit"
  exit 0
fi
[ "$(uname -m)" = x86_64 ] || { echo "install-cuda: expected an x86_64 machine, this is $(uname -m): install CUDA 13 by other means, with nvcc on PATH" >&2; exit 1; }
python3 -m pip --version > /dev/null 2>&1 || {
  echo "install-cuda: python3 has no pip here: apt-get install python3-pip (tools/install-deps.sh gpu does)" >&2
  exit 1
}
mkdir -p "$(dirname "$cache")"
# Unpacked aside and renamed, so that an interrupted call leaves nothing that looks whole.
aside=$(mktemp -d "$cache.XXXXXX")
trap 'rm -rf "$aside"' EXIT
echo "install-cuda: fetching CUDA's compiler and cuBLAS from PyPI (550 MB) into $cache" >&2
# pip checks the pinned sums. A pip of its own environment's rules (externally managed) does not matter: nothing is installed into Python.
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes --dest "$aside/wheels" -r "$here/cuda-wheels.txt" >&2
for wheel in "$aside"/wheels/*.whl; do
  python3 -m zipfile -e "$wheel" "$aside"
done
rm -rf "$aside/wheels"
# Python's zipfile keeps no modes, nvcc links from lib64, and CMake looks for libraries without a version.
chmod +x "$aside"/nvidia/cu13/bin/* "$aside"/nvidia/cu13/nvvm/bin/*
ln -s lib "$aside/nvidia/cu13/lib64"
for library in "$aside"/nvidia/cu13/lib/lib*.so.*; do
  name=${library##*/}
  ln -s "$name" "${library%/*}/${name%%.so.*}.so"
done
cp "$here/cuda-wheels.txt" "$aside/wheels.txt"
chmod 755 "$aside"
rm -rf "$cache"
mv "$aside" "$cache"
trap - EXIT
echo "$toolkit"
