#!/usr/bin/env python3
"""tools/compile_commands.py BUILD: compile_commands.json at the top, for clangd, from that of a build folder.

A unity build compiles groups of sources; here each source has the command of its group. Device code (.cu) has the command of the tests' emulation, which
compiles it as C++ with any compiler, where there is one; otherwise nvcc's, of which .clangd removes what clang does not know.
"""

import json
import pathlib
import re
import shlex
import sys


def sources_of(entry):
    path = pathlib.Path(entry["file"])
    if path.parent.name != "Unity":
        return [str(path)]
    return re.findall(r'^#include "(.*)"$', path.read_text(), re.MULTILINE)


def command_of(entry, source):
    words = entry.get("arguments") or shlex.split(entry["command"])
    if pathlib.Path(words[0]).name == "ccache":
        words = words[1:]
    # Its output is of another file; a precompiled header is of the compiler that made it.
    kept, skip = [], False
    for i, word in enumerate(words):
        if skip or word in ("-c", "-Winvalid-pch") or word == entry["file"]:
            skip = False
            continue
        if word in ("-o", "-MF", "-MT", "-MQ", "-x") or (word == "-include" and "cmake_pch" in words[i + 1]):
            skip = True
            continue
        kept.append(word)
    if source.endswith(".cu") and "nvcc" not in pathlib.Path(kept[0]).name:
        kept += ["-x", "c++"]
    return kept + ["-c", source]


def main():
    build = pathlib.Path(sys.argv[1])
    top = pathlib.Path(__file__).resolve().parent.parent
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        for source in sources_of(entry):
            source = str((pathlib.Path(entry["directory"]) / source).resolve())
            command = command_of(entry, source)
            is_nvcc = "nvcc" in pathlib.Path(command[0]).name
            if source not in found or (not is_nvcc and found[source][0]):
                found[source] = (is_nvcc, {"directory": entry["directory"], "file": source, "arguments": command})
    text = json.dumps([entry for _, entry in found.values()], indent=1) + "\n"
    path = top / "compile_commands.json"
    if not path.exists() or path.read_text() != text:
        path.unlink(missing_ok=True)  # it may be a link into a build folder
        path.write_text(text)


if __name__ == "__main__":
    main()
