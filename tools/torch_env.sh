#!/bin/bash
# A Python with PyTorch for the tests of python/: torch_env.sh TORCH_VERSION [PACKAGE...] prints the path of its interpreter.
# It is a virtual environment of FW_CI_PYTHON (python3) in the user's cache (FW_TORCH_CACHE), made once for what is asked; from PyPI, whose torch brings CUDA's
# libraries along: 5 GB on disk. Nothing on standard output and exit code 77, the reason on standard error, where PyPI cannot be reached.
set -euo pipefail
version=$1
shift
python=${FW_CI_PYTHON:-python3}
cache=${FW_TORCH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fastweight}
wanted="torch==$version numpy setuptools $*"
folder=$cache/torch-$version-$(echo "$("$python" --version) $wanted" | sha256sum | cut -c1-12)

if [ ! -e "$folder/whole" ]; then
  pip() { "$folder/bin/python" -m pip -q --disable-pip-version-check --no-cache-dir "$@" >&2; }
  rm -rf "$folder"
  mkdir -p "$cache"
  "$python" -m venv "$folder" >&2 || { echo "torch_env: $python cannot make virtual environments" >&2; exit 77; }
  # A small package first: without PyPI this fails at once.
  if ! pip download --no-deps --retries 1 --timeout 20 -d "$folder/try" packaging; then
    rm -rf "$folder"
    echo "torch_env: PyPI cannot be reached" >&2
    exit 77
  fi
  # shellcheck disable=SC2086
  # Its byte code is made when it is needed: compiling all of torch takes longer than the tests.
  pip install --no-compile $wanted
  touch "$folder/whole"
fi
echo "$folder/bin/python"
