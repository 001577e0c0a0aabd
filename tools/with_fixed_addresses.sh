#!/bin/sh
# Runs a command without address randomisation where that is allowed: the sanitizers of GCC 12 and clang 14 expect a layout
# that newer kernels' randomisation does not keep ("unexpected memory mapping").
if setarch "$(uname -m)" -R true 2> /dev/null; then
  exec setarch "$(uname -m)" -R "$@"
fi
exec "$@"
