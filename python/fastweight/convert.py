"""Model folders between flash-linear-attention / Hugging Face and fastweight's program.

    python -m fastweight.convert import SOURCE TARGET [--tokenizer SPEC]
    python -m fastweight.convert export MODEL TARGET

Thin over `fastweight import` and `fastweight export`, which know the model types, read shards and check everything. The program is the one on PATH or in
FASTWEIGHT_PROGRAM.
"""

import argparse
import os
import shutil
import subprocess
import sys

from fastweight._library import Error

def _program():
    found = os.environ.get("FASTWEIGHT_PROGRAM") or shutil.which("fastweight")
    if not found:
        raise Error("fastweight: expected the program on PATH or in FASTWEIGHT_PROGRAM (`make` builds it), found none")
    return found


def _run(*arguments):
    done = subprocess.run([_program(), *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise Error((done.stderr or done.stdout).strip() or f"fastweight {arguments[0]}: exit code {done.returncode}")
    return done.stdout


def import_model(source, target, tokenizer=None):
    """A folder of flash-linear-attention or Hugging Face becomes one of ours; what the program says of it."""
    options = () if tokenizer is None else ("--tokenizer", tokenizer)
    return _run("import", source, target, *options)


def export_model(model, target):
    """A model or run folder of ours becomes one that flash-linear-attention reads."""
    return _run("export", model, target)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m fastweight.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=("import", "export"))
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--tokenizer")
    args = parser.parse_args(arguments)
    if args.direction == "export" and args.tokenizer:
        parser.error("--tokenizer: expected with import only")
    try:
        done = import_model(args.source, args.target, args.tokenizer) if args.direction == "import" else export_model(args.source, args.target)
    except Error as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    print(done, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
