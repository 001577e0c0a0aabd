"""Model folders from and to the FLA / Hugging Face format.

    python -m fastweight.convert import SOURCE TARGET [--tokenizer SPEC]
    python -m fastweight.convert export MODEL TARGET [--tokenizer SPEC]

Thin over `fastweight import` and `fastweight export`, which know the model types, read shards and check everything. The program is the one on PATH or in
FASTWEIGHT_PROGRAM.
"""

from __future__ import annotations

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


def import_model(source: str | os.PathLike, target: str | os.PathLike, tokenizer: str | os.PathLike | None = None) -> str:
    """Converts a folder in FLA / Hugging Face format to a model folder; returns the program's report.

    tokenizer: "bytes", "ids", or the path of a tokenizer.json or SentencePiece model; None takes the folder's own.
    Raises Error with the program's message, or where there is no program.

    >>> import fastweight
    >>> try:
    ...     import_model("/no/such/folder", "/no/such/target")
    ... except fastweight.Error as error:
    ...     print("refused")
    refused
    """
    return _run("import", source, target, *_tokenizer(tokenizer))


def export_model(model: str | os.PathLike, target: str | os.PathLike, tokenizer: str | os.PathLike | None = None) -> str:
    """Converts a model or run folder to FLA / Hugging Face format; arguments and errors as in import_model.

    >>> import fastweight
    >>> try:
    ...     export_model("/no/such/folder", "/no/such/target")
    ... except fastweight.Error as error:
    ...     print("refused")
    refused
    """
    return _run("export", model, target, *_tokenizer(tokenizer))


def _tokenizer(tokenizer):
    return () if tokenizer is None else ("--tokenizer", tokenizer)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
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


__all__ = ["export_model", "import_model"]


def __dir__() -> list[str]:
    return list(__all__)


if __name__ == "__main__":
    sys.exit(main())
