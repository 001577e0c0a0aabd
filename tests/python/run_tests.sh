#!/bin/bash
# The tests of this folder with the library of a build: run_tests.sh LIBRARY SOURCE_DIR. Skipped (77) where FW_PYTHON (python3) has no torch.
set -euo pipefail
python=${FW_PYTHON:-python3}
if ! "$python" -c 'import sys, torch; assert sys.version_info >= (3, 9)' 2> /dev/null; then
  echo "skipped: $python has no torch (FW_PYTHON=/path/to/python names another)"
  exit 77
fi
cd "$2/tests/python"
export FASTWEIGHT_LIBRARY=$1 PYTHONPATH=$2/python${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
program=$(dirname "$1")/fastweight
[ ! -x "$program" ] || export FASTWEIGHT_PROGRAM=$program
exec "$python" -W ignore -m unittest discover -p 'test_*.py'
