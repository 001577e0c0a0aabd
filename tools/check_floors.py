#!/usr/bin/env python3
"""The floors (docs/internals/architecture.md): which folder of src/ may include which. Prints file:line for every include that
points up, and exits 1 if there is one. The public header fastweight/fastweight.h may be included everywhere."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Bottom up; a folder may include itself and what its entry names, which is what it needs and no more. reference is for tests,
# selftest, verify and bench only, which is why nothing above it in the list has it except cli (and there only the files of
# REFERENCE_USERS).
MAY_INCLUDE = {"base": set()}
MAY_INCLUDE["rule"] = {"base"}
MAY_INCLUDE["gpu"] = {"base"}
MAY_INCLUDE["scan"] = {"base", "rule", "gpu"}
MAY_INCLUDE["reference"] = {"base", "rule"}
MAY_INCLUDE["ops"] = {"base", "rule", "gpu", "scan"}
MAY_INCLUDE["nn"] = MAY_INCLUDE["ops"] | {"ops"}
MAY_INCLUDE["model"] = MAY_INCLUDE["nn"] | {"nn"}
MAY_INCLUDE["tokenizer"] = {"base"}
MAY_INCLUDE["train"] = MAY_INCLUDE["model"] | {"model", "tokenizer"}
MAY_INCLUDE["generate"] = MAY_INCLUDE["model"] | {"model", "tokenizer"}
MAY_INCLUDE["tasks"] = MAY_INCLUDE["generate"] | {"train", "generate"}
MAY_INCLUDE["report"] = {"base", "tasks"}
MAY_INCLUDE["analyze"] = MAY_INCLUDE["train"] | {"train", "report"}
MAY_INCLUDE["cli"] = set(MAY_INCLUDE)
REFERENCE_USERS = re.compile(r"src/cli/(selftest|bench|verify)\w*\.(cpp|h)$")
# The reference is written from the papers alone: of rule/ it may know the axes, never the front that it checks.
NOT_FOR_REFERENCE = {"rule/front.h", "rule/precond.h", "rule/decay.h", "rule/gate_law.h"}


def problem(file: str, floor: str, target: str) -> str:
    """What is wrong with this include, or an empty string."""
    above = target.split("/")[0]
    if above not in MAY_INCLUDE or above == floor:
        return "" if "/" in target else f"expected a path from src/ or include/, such as {floor}/{target}"
    if above not in MAY_INCLUDE[floor]:
        return f"{floor}/ may include {', '.join(sorted(MAY_INCLUDE[floor] | {floor, 'fastweight'}))}; this is {above}/"
    if floor != above and re.match(r"scan/(cuda|cpu)/", target):
        return "the inside of scan is its own; scan/*.h is for others"
    if above == "reference" and not REFERENCE_USERS.match(file):
        return "reference/ is for tests and for src/cli/selftest*, bench* and verify* only"
    if floor == "reference" and target in NOT_FOR_REFERENCE:
        return "the reference shares no code with what it checks"
    return ""


# Folders of device code, which have an order of their own: none includes, by whatever way, a folder that includes it.
ORDERED = ("src/gpu", "src/scan/cuda", "src/ops/cuda")


def circles() -> list[str]:
    """Folders of ORDERED that include each other, with an include each way."""
    edges: dict[str, dict[str, str]] = {}
    for root in ORDERED:
        for path in sorted((ROOT / root).rglob("*")):
            if path.suffix not in (".h", ".cpp", ".def", ".cu", ".cuh"):
                continue
            folder = path.parent.relative_to(ROOT / "src").as_posix()
            for target in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(encoding="utf-8"), re.M):
                other = pathlib.PurePosixPath(target).parent.as_posix()
                if other != folder and f"src/{other}".startswith(ORDERED):
                    edges.setdefault(folder, {}).setdefault(other, f'{path.relative_to(ROOT)}: #include "{target}"')
    found = []
    for folder in sorted(edges):
        seen, todo = set(), [folder]
        while todo:
            for other in edges.get(todo.pop(), {}):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        if folder in seen:
            found += [f"{why} (a circle: src/{other} includes src/{folder})" for other, why in edges[folder].items()
                      if folder in edges.get(other, {}) and folder < other]
    return found


def main() -> int:
    bad = checked = 0
    for line in circles():
        print(line)
        bad += 1
    for path in sorted(ROOT.glob("src/**/*")):
        if path.suffix not in (".h", ".cpp", ".def", ".cu", ".cuh"):
            continue
        file = path.relative_to(ROOT).as_posix()
        floor = file.split("/")[1]
        checked += 1
        if floor not in MAY_INCLUDE:
            print(f"{file}: a new floor '{floor}': say in tools/check_floors.py what it may include")
            bad += 1
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            text = problem(file, floor, match.group(1)) if match else ""
            if text:
                print(f'{file}:{number}: #include "{match.group(1)}": {text}')
                bad += 1
    for floor in MAY_INCLUDE:
        if not (ROOT / "src" / floor).is_dir():
            print(f"src/{floor}: named in tools/check_floors.py, and there is no such folder")
            bad += 1
    print(f"floors: {checked} files, {bad} includes that point up" if bad else f"floors: {checked} files, all includes point down")
    return 1 if bad or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
