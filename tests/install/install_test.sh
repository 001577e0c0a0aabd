#!/bin/sh
# install_test.sh BUILD SOURCE: installs BUILD into a scratch prefix and uses it as a stranger would: the example built by
# find_package and by pkg-config, and run; the program run; only the C header's functions exported; DESTDIR respected.
set -eu
build=$1
source=$2
scratch=$(mktemp -d "${TMPDIR:-/tmp}/fastweight install.XXXXXX") # a space in the path, because users have them
trap 'rm -rf "$scratch"' EXIT
prefix=$scratch/prefix
fail() { echo "install test: $*" >&2; exit 1; }

cmake --install "$build" --prefix "$prefix" > "$scratch/log" || fail "cmake --install failed: $(cat "$scratch/log")"
library=$(find "$prefix" -name libfastweight.so)
[ -n "$library" ] || fail "expected libfastweight.so under the prefix, found none"
libdir=$(dirname "$library")

# The interface: exactly the functions that the header declares.
declared=$(sed -n 's/^FW_API .*[ *]\(fw_[a-z_]*\)(.*/\1/p' "$prefix/include/fastweight/fastweight.h" | sort)
exported=$(nm -D --defined-only "$library" | sed 's/.* //; s/@.*//' | sort)
[ -n "$declared" ] || fail "found no FW_API function in the installed header"
[ "$declared" = "$exported" ] || fail "the library exports
$exported
where the header declares
$declared"
soname=$(objdump -p "$library" | sed -n 's/^ *SONAME *//p')
[ "$soname" = libfastweight.so.0 ] || fail "expected SONAME libfastweight.so.0, got '$soname'"

cmake -S "$source/tests/install/consumer" -B "$scratch/consumer" -DCMAKE_PREFIX_PATH="$prefix" -DEXAMPLE="$source/examples/attention.c" > "$scratch/log" 2>&1 &&
  cmake --build "$scratch/consumer" > "$scratch/log" 2>&1 || fail "the example by find_package: $(cat "$scratch/log")"
"$scratch/consumer/attention" || fail "the example built by find_package failed"

# pkg-config quotes spaces for a shell, hence eval.
PKG_CONFIG_PATH=$libdir/pkgconfig
export PKG_CONFIG_PATH
version=$(pkg-config --modversion fastweight)
eval "${CC:-cc} -std=c99 -pedantic-errors \"\$source/examples/attention.c\" $(pkg-config --cflags --libs fastweight) -lm -o \"\$scratch/attention\""
LD_LIBRARY_PATH=$libdir "$scratch/attention" || fail "the example built by pkg-config failed"

"$prefix/bin/fastweight" rules > "$scratch/log" || fail "the installed program failed"
grep -q gated_deltanet2 "$scratch/log" || fail "expected the rules of the installed program, got $(cat "$scratch/log")"
for page in bash-completion/completions/fastweight zsh/site-functions/_fastweight fish/vendor_completions.d/fastweight.fish man/man1/fastweight.1; do
  grep -q train "$prefix/share/$page" || fail "expected share/$page with the commands of the program"
done
[ -f "$prefix/share/fastweight/recipes/demo.toml" ] || fail "expected the recipes under share/fastweight/recipes"

DESTDIR=$scratch/stage cmake --install "$build" --prefix /usr/local > "$scratch/log" || fail "staged: $(cat "$scratch/log")"
[ -x "$scratch/stage/usr/local/bin/fastweight" ] || fail "DESTDIR: expected the program under the staging folder"
! grep -rq "$scratch" "$scratch/stage/usr/local/lib/cmake" "$scratch/stage/usr/local/lib/pkgconfig" || fail "DESTDIR: the staging folder is named inside the package files"
echo "install test: version $version: find_package, pkg-config, program, exports and DESTDIR are right"
