#!/bin/sh
# The C, C++ and CUDA files of the project, one a line: those of git and new ones that git does not ignore.
cd "$(dirname "$0")/.."
git ls-files --cached --others --exclude-standard -- '*.c' '*.h' '*.cpp' '*.cu' '*.cuh' | sort -u | while IFS= read -r file; do
  if [ -f "$file" ]; then printf '%s\n' "$file"; fi
done
