#!/bin/bash
# Packs a build for a machine that has a GPU and neither this machine's packages nor a compiler: programs without symbols and
# the libraries that they need, but for the driver's and the C library's. There, in a copy of this repository:
#   mkdir -p BUILD && tar xJf ARCHIVE -C BUILD && BUILD/run tools/gpu_test.sh BUILD
# BUILD/run COMMAND... runs a command with those libraries, and with cuBLAS of the Python package `nvidia` where there is one.
# Tests look for their files where they were built: run makes a link there, if nothing lies there.
#   tools/gpu_pack.sh BUILD ARCHIVE.tar.xz [PROGRAM...]     PROGRAM: paths below BUILD; without: all that make gpu-test needs
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,7s/^# \?//p' "$0" >&2; exit 2; }
source=$(cd "$(dirname "$0")/.." && pwd)
build=$(cd "$1" && pwd)
archive=$(realpath -m "$2")
shift 2
stage=$(mktemp -d)
trap 'rm -rf "$stage" "$archive.part"' EXIT

if [ $# -eq 0 ]; then
  mapfile -t programs < <(cd "$build" && ls fastweight libfastweight.so tests/*_test tests/test_cuda 2> /dev/null)
else
  programs=("$@")
fi
[ ${#programs[@]} -gt 0 ] || { echo "gpu_pack: no program in $build (make gpu-test builds them)" >&2; exit 1; }

mkdir "$stage/lib"
for program in "${programs[@]}"; do
  [ -f "$build/$program" ] || { echo "gpu_pack: expected a program of $build, got $program" >&2; exit 1; }
  mkdir -p "$stage/$(dirname "$program")"
  strip --strip-unneeded -o "$stage/$program" "$build/$program"
  ldd "$build/$program" | awk '$3 ~ /^\// { print $3 }'
done | grep -vE '/lib(c|m|dl|rt|pthread|cuda|nvidia-ml|fastweight)\.so' | sort -u | while read -r library; do
  cp -L "$library" "$stage/lib/"
done

cat > "$stage/run" << END
#!/bin/bash
# run COMMAND...: with the libraries beside this file (tools/gpu_pack.sh).
set -eu
here=\$(cd "\$(dirname "\$0")" && pwd)
blas=\$(python3 -c 'import importlib.util, glob; print(":".join(p for r in importlib.util.find_spec("nvidia").submodule_search_locations for p in glob.glob(r + "/*/lib")))' 2> /dev/null || true)
export LD_LIBRARY_PATH=\$here/lib\${blas:+:\$blas}\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
if [ ! -e "$source" ]; then
  mkdir -p "$(dirname "$source")" && ln -s "\$PWD" "$source"
fi
exec "\$@"
END
chmod +x "$stage/run"
mkdir -p "$(dirname "$archive")"
# Programs share their device code: with a window that spans all, it is stored once.
(cd "$stage" && find . -type f -printf '%s %p\n' | sort -rn | cut -d ' ' -f 2- | tar -c -T -) | xz -T1 --lzma2=preset=1,dict=512MiB > "$archive.part"
mv "$archive.part" "$archive"
echo "$archive: ${#programs[@]} programs, $(ls "$stage/lib" | wc -l) libraries, $(($(stat -c %s "$archive") >> 20)) MiB"
