#!/bin/sh
# Installs what is missing of the Debian packages that a task needs; says nothing and does nothing when all is there.
#   tools/install-deps.sh [--list] build|test|demo|ci|gpu ...
# The sets: build (compiler, libraries, GoogleTest), test (and gnuplot, which tests call), demo (and fortunes), ci (and
# clang's tools), gpu (pip, for tools/install-cuda.sh).
# FW_SKIP_DEPS=1 skips the check, for systems where the dependencies come from elsewhere.
set -eu

# g++ may be any C++20 compiler that is on PATH as g++; the rest are headers and libraries of Debian 12.
build_set="g++ cmake ninja-build ccache pkg-config libdnnl-dev libhwy-dev libopenblas-openmp-dev libfmt-dev \
libcli11-dev libtomlplusplus-dev nlohmann-json3-dev libsentencepiece-dev zlib1g-dev libzstd-dev libicu-dev libonig-dev libgtest-dev libgmock-dev librapidcheck-dev \
libopenmpi-dev openmpi-bin"
test_set="gnuplot-nox fonts-dejavu-core"
# gnuplot-nox draws text through cairo and fontconfig; one scalable font is enough. fortunes brings fortunes-min.
demo_set="gnuplot-nox fonts-dejavu-core fortunes"
ci_set="clang clang-format clang-tidy libclang-rt-14-dev python3-minimal"

list_only=no
packages=""
[ $# -gt 0 ] || set -- build
for set in "$@"; do
  case $set in
    --list) list_only=yes ;;
    build) packages="$packages $build_set" ;;
    test) packages="$packages $build_set $test_set" ;;
    demo) packages="$packages $build_set $demo_set" ;;
    ci) packages="$packages $build_set $test_set $demo_set $ci_set" ;;
    gpu) packages="$packages python3-pip" ;;
    *) echo "install-deps: expected build, test, demo, ci or gpu, got '$set'" >&2; exit 2 ;;
  esac
done
if [ $list_only = yes ]; then
  printf '%s\n' $packages | sort -u
  exit 0
fi
[ "${FW_SKIP_DEPS:-0}" != 1 ] || exit 0

if ! command -v dpkg-query > /dev/null; then
  echo "install-deps: this is not a Debian system (no dpkg-query). Install the equivalents of these packages and set FW_SKIP_DEPS=1:" >&2
  printf '%s\n' $packages | sort -u | tr '\n' ' ' >&2
  echo >&2
  exit 1
fi

wanted=$(printf '%s\n' $packages | sort -u)
have=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' $wanted 2> /dev/null | sed -n 's/ installed$//p') || true
# A python3 from elsewhere does as well.
command -v python3 > /dev/null && have="$have python3-minimal"
python3 -m pip --version > /dev/null 2>&1 && have="$have python3-pip"
missing=""
for package in $wanted; do
  case " $(echo $have) " in *" $package "*) ;; *) missing="$missing $package" ;; esac
done
[ -n "$missing" ] || exit 0

echo "install-deps: installing$missing (a few minutes the first time)"
if [ "$(id -u)" = 0 ]; then
  as_root=""
elif command -v sudo > /dev/null; then
  as_root="sudo"
else
  echo "install-deps: not root and no sudo here. Run as root: apt-get install --no-install-recommends$missing" >&2
  exit 1
fi
apt() {
  # The lock timeout waits for another apt-get (unattended upgrades) instead of failing.
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@"
}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# The package lists may be absent or old: they are fetched only if the first try fails, which keeps the usual case quick.
if ! apt install -y --no-install-recommends $missing > "$log" 2>&1; then
  if ! { apt update && apt install -y --no-install-recommends $missing; } > "$log" 2>&1; then
    cat "$log" >&2
    echo "install-deps: apt-get could not install$missing (its output is above)" >&2
    exit 1
  fi
fi
