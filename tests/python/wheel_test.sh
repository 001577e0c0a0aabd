#!/bin/bash
# The wheel as a user gets it: built from the tree (without CUDA: what nvcc compiles has tests of its own), installed into a fresh virtual
# environment that sees the torch of the Python it is made with, asked for its version and files, and run on quick tests of this folder.
#   wheel_test.sh SOURCE_DIR
# Exit code 77 (skipped) where that Python has no torch, or pip cannot reach scikit-build-core.
set -euo pipefail
source=$1
python=${FW_PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
skip() {
  echo "skipped: $1"
  exit 77
}

"$python" -c 'import importlib.util, sys; assert sys.version_info >= (3, 9) and importlib.util.find_spec("torch")' 2> /dev/null || skip "$python has no torch (FW_PYTHON=/path/to/python names another)"
"$python" -m venv "$work/build" 2> /dev/null || skip "$python cannot make virtual environments"
"$work/build/bin/pip" -q --disable-pip-version-check download --no-deps -d "$work" scikit-build-core > /dev/null 2>&1 || skip "pip cannot reach scikit-build-core"

FW_PYTHON="$python" FW_WHEEL_CUDA=OFF "$source/tools/wheel.sh" "$work/dist"
"$python" -m venv "$work/user"
"$work/user/bin/pip" -q --disable-pip-version-check install --no-deps "$work"/dist/fastweight-*.whl
site=$("$work/user/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("torch").origin).parents[1])' > "$site/torch_of_the_other.pth"

# From a folder that has no fastweight, so that only the installed one can be found.
cp -r "$source/tests/python" "$work/tests"
cd "$work/tests"
unset FASTWEIGHT_LIBRARY PYTHONPATH PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=${FW_TORCH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fastweight}/bytecode  # as in run_tests.sh
"$work/user/bin/python" -c "
import fastweight
import os
assert fastweight.find_library().startswith('$work/user'), fastweight.find_library()
assert os.path.exists(os.path.join(os.path.dirname(fastweight.__file__), 'py.typed')), 'the wheel has no py.typed'
print('fastweight', fastweight.version(), 'on', fastweight.simd_target(), 'from', fastweight.find_library())"
# Every file of the package is in the wheel.
diff <(cd "$source/python/fastweight" && find . -name '*.py' -o -name py.typed | sort) <(cd "$site/fastweight" && find . -name '*.py' -o -name py.typed | sort)
# The others test the same functions of the same sources as they do with a build's library (run_tests.sh).
"$work/user/bin/python" -W ignore -m unittest test_checks test_docs test_ops test_servers test_tools 2>&1
