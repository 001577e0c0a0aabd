"""Model folders between flash-linear-attention / Hugging Face and fastweight's program.

    python -m fastweight.convert import SOURCE TARGET [--tokenizer SPEC]
    python -m fastweight.convert export MODEL TARGET [--tokenizer SPEC]

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
    """Turns a folder of flash-linear-attention or Hugging Face into one of fastweight's; returns what the program says of it.

    tokenizer: "bytes", "ids" or the path of a tokenizer.json or SentencePiece model; None takes the folder's. Raises Error with the program's message.
    """
    return _run("import", source, target, *_tokenizer(tokenizer))


def export_model(model, target, tokenizer=None):
    """Turns a model or run folder of fastweight's into one that flash-linear-attention reads; arguments and errors as for import_model."""
    return _run("export", model, target, *_tokenizer(tokenizer))


def _tokenizer(tokenizer):
    return () if tokenizer is None else ("--tokenizer", tokenizer)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m fastweight.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=("import", "export"))
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--tokenizer")
    args = parser.parse_args(arguments)
    convert = import_model if args.direction == "import" else export_model
    try:
        done = convert(args.source, args.target, args.tokenizer)
    except Error as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    print(done, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
