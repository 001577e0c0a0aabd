"""Model folders between flash-linear-attention / Hugging Face and fastweight's program.

    python -m fastweight.convert import SOURCE TARGET [--tokenizer SPEC]
    python -m fastweight.convert export MODEL TARGET

Thin over `fastweight import` and `fastweight export`, which know the model types and check everything; what is done here is what they do not do: a source
whose weights are in shards (model.safetensors.index.json) is joined first, in a folder beside the target that is removed again. The program is the one on
PATH or in FASTWEIGHT_PROGRAM.
"""

import argparse
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

from fastweight._library import Error

_INDEX = "model.safetensors.index.json"
_COPY_BYTES = 1 << 24


def _header(file):
    """The JSON header of a safetensors file and where its data begins."""
    with open(file, "rb") as stream:
        raw = stream.read(8)
        size = struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
        if not 0 < size <= min(100 << 20, os.path.getsize(file) - 8):
            raise Error(f"{file}: expected a safetensors file, got one whose header of {size} bytes does not fit")
        try:
            return json.loads(stream.read(size)), 8 + size
        except ValueError as error:
            raise Error(f"{file}: expected a JSON header, got: {error}") from None


def join_shards(folder, target):
    """Writes the tensors of all shards of a folder into one safetensors file, in the order of their names."""
    folder = pathlib.Path(folder)
    try:
        weights = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        places = {name: folder / pathlib.PurePath(file).name for name, file in weights.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Error(f"{folder / _INDEX}: expected weight_map with a file for every tensor, got: {error!r}") from None
    headers = {}
    for file in sorted(set(places.values())):
        if not file.is_file():
            raise Error(f"{folder / _INDEX}: expected the shard {file.name} beside it, which is not there")
        headers[file] = _header(file)
    joined, pieces, end = {}, [], 0
    for name in sorted(places):
        header, data = headers[places[name]]
        if name not in header:
            raise Error(f"{places[name]}: expected the tensor {name}, as {_INDEX} says, got none")
        begin, stop = header[name]["data_offsets"]
        if not 0 <= begin <= stop <= os.path.getsize(places[name]) - data:
            raise Error(f"{places[name]}: {name}: expected bytes inside the file, got {begin} to {stop}")
        joined[name] = {**header[name], "data_offsets": [end, end + stop - begin]}
        end += stop - begin
        pieces.append((places[name], data + begin, stop - begin))
    text = json.dumps({"__metadata__": {"format": "pt"}, **joined}).encode()
    text += b" " * (-len(text) % 8)
    with open(target, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for file, begin, count in pieces:
            with open(file, "rb") as stream:
                stream.seek(begin)
                while count > 0:
                    piece = stream.read(min(count, _COPY_BYTES))
                    out.write(piece)
                    count -= len(piece)


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
    source, target = pathlib.Path(source), pathlib.Path(target)
    options = () if tokenizer is None else ("--tokenizer", tokenizer)
    if (source / "model.safetensors").exists() or not (source / _INDEX).exists():
        return _run("import", source, target, *options)
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".fastweight-join-") as whole:
        for file in source.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and file.name != _INDEX:
                shutil.copy(file, whole)
        join_shards(source, pathlib.Path(whole) / "model.safetensors")
        return _run("import", whole, target, *options)


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
