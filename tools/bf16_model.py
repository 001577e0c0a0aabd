#!/usr/bin/env python3
"""A model folder with its float32 parameters rounded to bf16, half as large: tools/bf16_model.py MODEL TARGET

fastweight reads it as any other. examples/shakespeare is made so."""

import array
import json
import pathlib
import shutil
import struct
import sys


def to_bf16(data: bytes) -> bytes:
    """To the nearest, ties to even. The parameters are finite."""
    words = array.array("I", data)
    return array.array("H", ((w + 0x7FFF + (w >> 16 & 1)) >> 16 for w in words)).tobytes()


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = map(pathlib.Path, sys.argv[1:])
    file = (source / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", file[:8])
    header = json.loads(file[8 : 8 + size])
    out, data = {"__metadata__": header.pop("__metadata__", {})}, b""
    out["__metadata__"].pop("fastweight_checksum", None)  # of the other bytes
    for name, tensor in sorted(header.items()):
        begin, end = tensor["data_offsets"]
        values, dtype = file[8 + size + begin : 8 + size + end], tensor["dtype"]
        if dtype == "F32":
            values, dtype = to_bf16(values), "BF16"
        out[name] = {"dtype": dtype, "shape": tensor["shape"], "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(out, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    target.mkdir(parents=True)
    (target / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    for other in source.iterdir():
        if other.name != "model.safetensors":
            shutil.copyfile(other, target / other.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
