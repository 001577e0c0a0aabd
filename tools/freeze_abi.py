#!/usr/bin/env python3
"""Keeps the ABI of released versions: a copy of the C header and a table of its layout in tests/abi/VERSION.

    tools/freeze_abi.py            writes the folder of the header's version; changes none that is there
    tools/freeze_abi.py --check    exits 1 if a frozen file has changed, the header's version is not frozen, or the header
                                   lacks any of it; it may have more

layout.inc lists every struct with its bytes, every field with its offset and bytes, every constant and every function.
tests/abi/layout_test.c compares it with the header of today, and tests/abi/VERSION/program.c, compiled with the frozen
header, runs with the library of today. tests/abi/digests.txt has the SHA-256 of all frozen files. A release freezes its
header once. Until then, a run after `rm -r tests/abi/VERSION/fastweight` takes over a change."""

import ctypes
import hashlib
import importlib.util
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADER = ROOT / "include/fastweight/fastweight.h"
FOLDER = ROOT / "tests/abi"
DIGESTS = FOLDER / "digests.txt"
# Structs that may grow at their end; all others keep their size.
GROWING = ("fw_desc", "fw_inputs", "fw_outputs", "fw_sizes", "fw_short_conv", "fw_short_conv_tensors")


def parsed(text: str):
    """The header's structs as ctypes classes, read by the Python package's parser."""
    spec = importlib.util.spec_from_file_location("_header", ROOT / "python/fastweight/_header.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Header(text).structs


def version(text: str) -> str:
    return ".".join(re.search(rf"#define FW_VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def layout(text: str) -> str:
    lines = ["/* The layout of fastweight.h " + version(text) + ", written by tools/freeze_abi.py for a 64-bit machine. Do not edit. */"]
    for name, struct in parsed(text).items():
        lines.append(f"FW_STRUCT({name}, {ctypes.sizeof(struct)}, {int(name in GROWING)})")
        for field, _ in struct._fields_:
            place = getattr(struct, field)
            lines.append(f"FW_FIELD({name}, {field}, {place.offset}, {place.size})")
    plain = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    for body in re.findall(r"typedef enum \w+ \{(.*?)\}", plain, re.S):
        lines += [f"FW_VALUE({name}, {value})" for name, value in re.findall(r"(FW_\w+)\s*=\s*(-?\d+)", body)]
    lines += [f"FW_FUNCTION({name})" for name in re.findall(r"^FW_API [^;(]*?\b(fw_\w+)\(", plain, re.M)]
    return "\n".join(lines) + "\n"


def frozen_files():
    return sorted(path for path in FOLDER.glob("*/**/*") if path.is_file())


def digests() -> str:
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(FOLDER)}\n" for path in frozen_files())


def problems():
    text = HEADER.read_text(encoding="utf-8")
    folder = FOLDER / version(text)
    if not (folder / "layout.inc").exists():
        yield f"tests/abi/{version(text)}: expected the frozen header of this version, found none; run tools/freeze_abi.py, and write its program.c"
        return
    # What was added since the release is frozen with the next one, also at the end of a struct that may grow.
    today = set(layout(text).splitlines())
    sizes = {name: ctypes.sizeof(struct) for name, struct in parsed(text).items()}

    def kept(line):
        grown = re.fullmatch(r"FW_STRUCT\((\w+), (\d+), 1\)", line)
        return line in today or grown is not None and sizes.get(grown[1], 0) >= int(grown[2])

    if not all(map(kept, (folder / "layout.inc").read_text(encoding="utf-8").splitlines())):
        yield f"include/fastweight/fastweight.h: its layout differs from tests/abi/{version(text)}/layout.inc; a changed ABI needs a new version"
    known = dict(reversed(line.split("  ", 1)) for line in DIGESTS.read_text(encoding="utf-8").splitlines())
    found = dict(reversed(line.split("  ", 1)) for line in digests().splitlines())
    for name in sorted(known.keys() | found.keys()):
        if known.get(name) != found.get(name):
            what = "is not in digests.txt" if name not in known else "is missing" if name not in found else "has changed"
            yield f"tests/abi/{name}: {what}; frozen files stay as they are"


def main() -> int:
    if "--check" in sys.argv[1:]:
        found = list(problems())
        for problem in found:
            print(f"freeze_abi: {problem}")
        return 1 if found else 0
    text = HEADER.read_text(encoding="utf-8")
    folder = FOLDER / version(text)
    header = folder / "fastweight/fastweight.h"
    if header.exists():
        print(f"freeze_abi: {folder.relative_to(ROOT)} is frozen and stays as it is")
    else:
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text, encoding="utf-8")
        (folder / "layout.inc").write_text(layout(text), encoding="utf-8")
    DIGESTS.write_text(digests(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
