#!/bin/bash
# The tests of this folder with the library of a build: run_tests.sh LIBRARY SOURCE_DIR. Skipped (77) where FW_PYTHON (python3) has no torch.
set -euo pipefail
python=${FW_PYTHON:-python3}
if ! "$python" -c 'import importlib.util, sys; assert sys.version_info >= (3, 9) and importlib.util.find_spec("torch")' 2> /dev/null; then
  echo "skipped: $python has no torch (FW_PYTHON=/path/to/python names another)"
  exit 77
fi
cd "$2/tests/python"
export FASTWEIGHT_LIBRARY=$1 PYTHONPATH=$2/python${PYTHONPATH:+:$PYTHONPATH}
# Byte code of torch and its like, which tools/torch_env.sh installs without, is made once and kept, outside of the tree: without it every process of these tests spends ten seconds on
# compiling what it imports.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=${FW_TORCH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fastweight}/bytecode
program=$(dirname "$1")/fastweight
[ ! -x "$program" ] || export FASTWEIGHT_PROGRAM=$program
exec "$python" -W ignore -m unittest discover -p 'test_*.py'
