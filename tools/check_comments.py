#!/usr/bin/env python3
"""Lines and comments of C, C++ and CUDA sources: no line over 120 columns, no sentence of a comment over 35 words.

Wider may be: tables in comments (cells apart by three spaces or more, or rules of dashes) and lines whose string
literal alone reaches beyond the limit. A sentence ends at a full stop, a question mark or an exclamation mark that a
space or the line's end follows, at an empty comment line, before a list item, and where a table or a sample begins.
A sample is a line of JSON, or one that is indented by four spaces beyond the first.
"""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 120
WORDS = 35
TABLE = re.compile(r"\S {3,}\S|-{20,}|\+-|^\s*\|")
SAMPLE = re.compile(r' {4,}(?![-*] |\d+\. )|\s*\{"')
ENDS = re.compile(r"(?<=[.?!])(?<!e\.g\.)(?<!i\.e\.)[)\"']*(?:\s+|$)")
WORD = re.compile(r"[A-Za-z][A-Za-z'_-]*")


def sources():
    out = subprocess.run([ROOT / "tools/sources.sh"], check=True, capture_output=True, text=True).stdout
    # The frozen header of a release stays as it was released.
    return [Path(line) for line in out.splitlines() if not line.startswith("tests/abi/")]


def comment(line):
    """The text of a line that is a comment, else None."""
    text = line.strip()
    if text.startswith("///"):
        text = text[3:]
    elif text.startswith(("//", "/*", "* ")):
        text = re.sub(r"\*/$", "", text[2:].rstrip())
    else:
        return None
    return text[1:] if text.startswith(" ") else text


def literal_is_too_wide(line):
    """Whether a string without a space to break at, or a raw string, is what makes the line so wide."""
    if re.search(r'R"', line) or line.lstrip().startswith(("{", '"')) and '"' in line and "//" not in line:
        return True
    return any(len(m) > 60 for m in re.findall(r'"(?:[^"\\]|\\.)*"', line))


def blocks(lines):
    """Runs of prose in comments: (number of the first line, text)."""
    start, words = 0, []
    for number, line in enumerate(lines, 1):
        text = comment(line)
        if text is None or not text.strip() or TABLE.search(text) or SAMPLE.match(text):
            if words:
                yield start, " ".join(words)
            words = []
            continue
        if re.match(r"\s*(?:[-*] |\d+\. )", text) and words:
            yield start, " ".join(words)
            words = []
        if not words:
            start = number
        words.append(text.strip())
    if words:
        yield start, " ".join(words)


def problems(path):
    raw = False
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        was_raw = raw
        if raw:
            raw = not re.search(r'\)\w*"', line)
        elif re.search(r'R"\w*\((?!.*\)\w*")', line):
            raw = True
        if len(line) <= COLUMNS or was_raw or raw or literal_is_too_wide(line):
            continue
        text = comment(line)
        if text is not None and TABLE.search(text):
            continue
        yield f"{path}:{number}: {len(line)} columns, at most {COLUMNS}"
    for number, text in blocks(lines):
        for sentence in ENDS.split(text):
            count = len(WORD.findall(sentence))
            if count > WORDS:
                yield f"{path}:{number}: a sentence of {count} words, at most {WORDS}: {sentence.strip()[:90]}..."


def main():
    files = sources()
    found = [problem for path in files for problem in problems(path)]
    for problem in found:
        print(problem, file=sys.stderr)
    if found:
        print(f"comments: {len(found)} lines and sentences that are too long", file=sys.stderr)
        return 1
    print(f"comments: {len(files)} files, no line over {COLUMNS} columns, no sentence over {WORDS} words")
    return 0


if __name__ == "__main__":
    sys.exit(main())
