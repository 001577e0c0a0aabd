#!/usr/bin/env python3
"""clang-tidy over the project's sources, as many at a time as there are cores, within a budget of time.

    tools/tidy.py [--minutes M] [--build build-tidy] [FILE ...]

A file whose preprocessed text and .clang-tidy have passed before is not checked again (a stamp in
$XDG_CACHE_HOME/fastweight-tidy). The rest are taken newest change first, so that what a budget leaves out is what
changed longest ago; how many were left out is printed. Exits 1 if any check fails."""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def stamp_of(entry: dict, cache: pathlib.Path) -> pathlib.Path:
    """The stamp file of a passed check: named by everything that decides its outcome."""
    command = shlex.split(entry["command"])
    if "ccache" in os.path.basename(command[0]):
        command = command[1:]
    command = command[: command.index("-o")] + ["-E", "-P", entry["file"]]  # CMake writes: flags -o object -c file
    text = subprocess.run(command, cwd=entry["directory"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout
    source = pathlib.Path(entry["file"]).read_bytes()  # comments too: NOLINT is one
    return cache / hashlib.sha256(text + source + (ROOT / ".clang-tidy").read_bytes()).hexdigest()


def check(entry: dict, build: pathlib.Path, cache: pathlib.Path, deadline: float) -> tuple[str, str]:
    """("passed" | "known" | "failed" | "late", output)"""
    if time.monotonic() > deadline:
        return "late", ""
    stamp = stamp_of(entry, cache)
    if stamp.exists():
        return "known", ""
    command = ["clang-tidy", "--quiet", "-p", str(build), entry["file"]]
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False, timeout=deadline - time.monotonic() + 60)
    except subprocess.TimeoutExpired:
        return "late", ""
    if done.returncode != 0:
        return "failed", done.stdout + done.stderr
    stamp.touch()
    return "passed", ""


def newest_first(files: list[str]) -> list[str]:
    """By the latest commit that touched each; files that git does not know yet come first."""
    log = subprocess.run(["git", "log", "--format=", "--name-only"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout
    order: dict[str, int] = {}
    for name in log.splitlines():
        order.setdefault(name, len(order) + 1)
    return sorted(files, key=lambda f: (order.get(os.path.relpath(f, ROOT), 0), f))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="budget of time (60)")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build-tidy", help="folder with compile_commands.json (build-tidy)")
    parser.add_argument("files", nargs="*", help="only these files")
    arguments = parser.parse_args()
    database = arguments.build / "compile_commands.json"
    if not database.exists():
        print(f"tidy: {database} is missing; run: cmake --preset tidy", file=sys.stderr)
        return 2
    only = {str(pathlib.Path(f).resolve()) for f in arguments.files}
    entries = {e["file"]: e for e in json.loads(database.read_text()) if e["file"].endswith((".cpp", ".c")) and (not only or e["file"] in only)}
    if not entries:
        print("tidy: expected at least one source file, found none", file=sys.stderr)
        return 2
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "fastweight-tidy"
    cache.mkdir(parents=True, exist_ok=True)

    deadline = time.monotonic() + 60 * arguments.minutes
    count = {"passed": 0, "known": 0, "failed": 0, "late": 0}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        jobs = [pool.submit(check, entries[f], arguments.build, cache, deadline) for f in newest_first(list(entries))]
        for job in concurrent.futures.as_completed(jobs):
            outcome, output = job.result()
            count[outcome] += 1
            if output:
                print(output, flush=True)
    print(f"tidy: {count['passed']} files passed, {count['known']} passed before, {count['failed']} failed, {count['late']} left out for lack of time")
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
