#!/usr/bin/env python3
"""What sources, tests and documents cite is in the repository: every NAME.md they name is a file here (from the root, from the file's
own folder, or under docs/), every link of a document leads to a file and, with #, to a heading of it, every section of recurrence.md
that a source names is one, and no line names a file beside the checkout. Prints file:line for each that is not so, and exits 1."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".def", ".py", ".sh", ".md", ".txt", ".cmake", ".toml", ".c"}
MARKDOWN = re.compile(r"(?<![\w/.*-])([\w./-]*\w\.md)\b")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SECTION = re.compile(r"recurrence\.md(?: section)?s? (\d+)")
WRITTEN = {"table.md", "comparison.md", "OUT.md", "page.md"}  # by the program, where it is run
OUTSIDE = re.compile(r"shared/(design|baselines|hooks)\b")


def anchors(path: pathlib.Path) -> set:
    """The names that GitHub gives the headings of a document."""
    names = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r"#+ (.*)", line)
        if match:
            names.add(re.sub(r"[^\w\- ]", "", match.group(1).lower()).strip().replace(" ", "-"))
    return names


def named_file(name: str, file: pathlib.Path, below_docs: set) -> bool:
    return pathlib.PurePath(name).name in WRITTEN or (ROOT / name).exists() or (file.parent / name).exists() or name in below_docs


def problems(line: str, file: pathlib.Path, below_docs: set, sections: set):
    for name in MARKDOWN.findall(line):
        if not named_file(name.lstrip("/"), file, below_docs):  # FW_SOURCE_DIR "/docs/..."
            yield f"{name} is not in the repository"
    for section in SECTION.findall(line):
        if section not in sections:
            yield f"docs/recurrence.md has no section {section}"
    outside = OUTSIDE.search(line)
    if outside:
        yield f"{outside.group(0)} is beside the checkout: cite docs/"
    if file.suffix != ".md":
        return
    for target in LINK.findall(line):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = file.parent / name if name else file
        if not path.exists():
            yield f"the link {target} leads nowhere"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            yield f"the link {target}: {path.name} has no such heading"


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True)
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name and pathlib.Path(name).suffix in SUFFIXES and (ROOT / name).exists()]
    below_docs = {path.name for path in (ROOT / "docs").glob("**/*.md")}
    sections = set(re.findall(r"^## (\d+)\.", (ROOT / "docs/recurrence.md").read_text(encoding="utf-8"), re.M))
    bad = 0
    for file in files:
        if file == pathlib.Path(__file__).resolve() or "corpus" in file.parts:
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            for text in problems(line, file, below_docs, sections):
                print(f"{file.relative_to(ROOT).as_posix()}:{number}: {text}")
                bad += 1
    print(f"citations: {len(files)} files, {bad} cite what is not here" if bad else f"citations: {len(files)} files cite only what is here")
    return 1 if bad or not files else 0


if __name__ == "__main__":
    sys.exit(main())
