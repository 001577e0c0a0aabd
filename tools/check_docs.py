#!/usr/bin/env python3
"""Checks the documents: dates, commit hashes, words of history, long sentences, links, commands and the word budget.

    tools/check_docs.py [--program build/fastweight] [--report] [FILE...]

Without FILE all pages are checked, and the total number of words too. Pages are of three kinds:

    reference   README.md, CONTRIBUTING.md, CHANGELOG.md and docs/: all checks
    rules       docs/rules: dates, links and sentences
    record      docs/results, bench/: links and sentences. docs/notes are frozen and not looked at

Not looked at: pages whose first five lines say that they are generated, and what stands between the lines
`<!-- name: begin (tool) -->` and `<!-- name: end -->`. Prints file:line for each problem, and exits 1 if there is one."""

import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOTAL_WORDS = 25000
PAGE_WORDS = 3000
README_WORDS = 700
SENTENCE_WORDS = 40
DATE = re.compile(r"\b20\d\d-\d\d(?:-\d\d)?\b|\b(?:January|February|March|April|May|June|July|August|September|October|November|December) 20\d\d\b")
HASH = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])(?!\d+e\d+\b)[0-9a-f]{7,40}\b")
HISTORY = re.compile(
    r"\bno longer\b|\b(?:was|were) asked for\b|\buntil now\b|\bany ?more\b|\bearlier (?:builds|versions|kernels)\b"
    r"|\bsince (?:then|20\d\d|\d{1,2} [A-Z]|January|February|March|April|May|June|July|August|September|October|November|December)",
    re.I,
)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)|<(?:img|a)\b[^>]*\b(?:src|href)=\"([^\"]+)\"")
RELEASE = re.compile(r"## \[?\d+\.\d+\.\d+\]? - \d{4}-\d\d-\d\d$")  # of CHANGELOG.md
GENERATED = re.compile(r"\bgenerated\b|\bmade by\b", re.I)
BEGIN = re.compile(r"<!-- [\w-]+: begin\b")
END = re.compile(r"<!-- [\w-]+: end\b")
# A command begins a line of code, or follows an operator of the shell.
BEFORE = r"(?:^|&&|\|\||[;|(]|\bor:|\b(?:sudo|time|exec)\s|\s-(?:n|np)\s*\d+\s|\bsrun\s(?:-\S+\s(?:\d+\s)?)*)\s*(?:\$ )?(?:[A-Z_]+=\S+\s+)*"
MAKE = re.compile(BEFORE + r"make((?:\s+[\w-]+)*)(?=$|[\s;&|)])")
PROGRAM = re.compile(BEFORE + r"(?:[\w./~$-]*/)?fastweight(?=\s+[a-z-])\s+([^;&|>#]*)")


def anchors(text: str) -> set:
    """The names that GitHub gives the headings of a document, and its own."""
    names = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    seen = {}
    code = False
    for line in text.splitlines():
        if line.startswith("```"):
            code = not code
        match = None if code else re.match(r"#+ (.*)", line)
        if match:
            heading = re.sub(r"\]\([^)]*\)", "", match.group(1))
            name = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
            count = seen.get(name, 0)
            seen[name] = count + 1
            names.add(f"{name}-{count}" if count else name)
    return names


def count_words(text: str) -> int:
    """Without operators and the bars of tables."""
    return sum(1 for word in text.split() if re.search(r"\w", word))


class Page:
    """A document without its generated parts: numbered lines of prose, lines of code, and sentences."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.prose = []  # (line, text)
        self.code = []  # (line, text), continued lines joined
        self.sentences = []  # (line, text)
        lines = self.text.splitlines()
        self.is_generated = any(GENERATED.search(line) and line.startswith(("<!--", ">")) for line in lines[:5])
        if not self.is_generated:
            self._split(lines)
        self.words = sum(count_words(text) for _, text in self.prose + self.code)

    def _split(self, lines):
        paragraph = []  # of (line, text)
        fenced = generated = False
        blank = True
        in_list = False
        for number, line in enumerate(lines, 1):
            stripped = line.strip()
            if BEGIN.search(line):
                generated = True
            elif END.search(line):
                generated = False
            elif generated:
                pass
            elif stripped.startswith("```"):
                self._end(paragraph)
                fenced = not fenced
            elif fenced or (line.startswith("    ") and not in_list and (blank or self.code and self.code[-1][0] == number - 1)):
                self._add_code(number, stripped)
            else:
                self.prose.append((number, line))
                item = re.match(r"\s*(?:[-*+]|\d+\.)\s+", line)
                if not stripped or stripped.startswith(("#", "|", ">", "<!--")) or item:
                    self._end(paragraph)
                if item:
                    in_list = True
                elif stripped and not line.startswith(" "):
                    in_list = in_list and not blank
                if stripped.startswith("|"):
                    for cell in re.split(r"(?<!\\)\|", stripped.strip("|")):
                        self._end([(number, cell)])
                elif stripped and not stripped.startswith(("#", "<!--")):
                    paragraph.append((number, line[item.end() :] if item else line))
            blank = not stripped
        self._end(paragraph)

    def _add_code(self, number, line):
        if self.code and self.code[-1][1].endswith("\\"):
            self.code[-1] = (number, self.code[-1][1][:-1] + " " + line)
        else:
            self.code.append((number, line))

    def _end(self, paragraph):
        """Cuts the paragraph into sentences. A code span or a link is its words as one."""
        if not paragraph:
            return
        text = " ".join(line for _, line in paragraph)
        text = re.sub(r"`[^`]*`", "`code`", text)
        text = re.sub(r"\]\([^)\s]*\)", "]", text)
        start = paragraph[0][0]
        for sentence in re.split(r"(?<=[.!?])[)\"*]*\s+(?=[A-Z`(\[\"*\d])", text):
            if not re.search(r"\b(?:e\.g|i\.e|cf|et al|Fig)\.$", sentence):
                self.sentences.append((start, sentence))
        paragraph.clear()

    def long_sentences(self):
        return [(number, text) for number, text in self.sentences if count_words(text) > SENTENCE_WORDS]

    def commands(self):
        """All that may be a command: code spans and lines of code."""
        for number, line in self.prose:
            for span in re.findall(r"`([^`]+)`", line):
                yield number, span
        for number, line in self.code:
            yield number, line


class Commands:
    """The targets of the Makefile, and the program's commands with their options: of the program, else from its sources."""

    def __init__(self, program):
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        self.targets = {name for line in re.findall(r"^([a-z][\w -]*):(?!=)", makefile, re.M) for name in line.split()}
        self.options = {}
        self.any_option = set()
        if program:
            script = subprocess.run([program, "completion", "bash"], check=True, capture_output=True, text=True).stdout
            models = subprocess.run([program, "sweep", "lm", "--help", "all"], check=True, capture_output=True, text=True).stdout
            self.options["sweep lm"] = set(re.findall(r"--[a-z][\w-]*", models)) | {"--help"}
            for command, options in re.findall(r"^    (\w+)\)\n      options='([^']*)'", script, re.M):
                self.options[command] = set(options.split()) | {"--help", "-h"}
        else:
            self._read_sources()

    def _read_sources(self):
        keys = set()
        for path in ROOT.glob("src/*/*.def"):
            names = re.findall(r"^FW_KEY\([^,]+(?:<[^>]*>)?, (\w+),", path.read_text(encoding="utf-8"), re.M)
            prefix = "" if path.stem in ("config", "data") else path.stem + "_"
            keys |= {prefix + name for name in names}
            keys |= {"window_" + name for name in names if path.stem == "attention"}
        for path in [*ROOT.glob("src/cli/**/*.cpp"), *ROOT.glob("src/tasks/*.cpp"), *ROOT.glob("src/tasks/*.def")]:
            text = path.read_text(encoding="utf-8")
            keys |= set(re.findall(r"\"([a-z][a-z0-9_-]*)\"", text))
            keys |= set(re.findall(r"^FW_KEY\([^,]+, (\w+),", text, re.M))
        commands = set(re.findall(r"\b([a-z]+)_command\(", (ROOT / "src/cli/main.cpp").read_text(encoding="utf-8")))
        self.any_option = {"--" + name.replace("_", "-") for name in keys}
        self.any_option |= {option.replace("--", "--no-", 1) for option in self.any_option} | {"--help", "--version", "-h"}
        self.options = {name: self.any_option for name in commands}

    def problems(self, text):
        if re.match(r"(?:import|from|find_package|#include)\b", text):
            return
        for match in MAKE.finditer(text):
            for target in match.group(1).split():
                if re.match(r"[a-z]", target) and target not in self.targets:
                    yield f"the Makefile has no target {target}"
        for match in PROGRAM.finditer(text):
            words = match.group(1).split()
            command = words[0]
            if command.startswith("-"):
                if command not in ("--help", "-h", "--version"):
                    yield f"fastweight has no option {command}"
                continue
            if words[:2] == ["sweep", "lm"]:  # a command of two words
                command = "sweep lm" if "sweep lm" in self.options else command
            if command not in self.options:
                yield f"fastweight has no command {command}"
                continue
            for word in words[1:]:
                if word == "--":
                    break
                option = re.match(r"\[?(--[a-z][\w-]*)", word)
                if option and option.group(1) not in self.options[command]:
                    yield f"fastweight {command} has no option {option.group(1)}"


def kind_of(name: str) -> str:
    if name.startswith("docs/notes/"):
        return "note"
    if name.startswith("docs/rules/"):
        return "rules"
    if name.startswith(("docs/results/", "bench/")):
        return "record"
    return "reference"


def link_problems(page: Page, texts: dict):
    for number, line in page.prose:
        for match in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            target = match[0] or match[1]
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (page.path.parent / name).resolve() if name else page.path
            if not path.exists():
                yield number, f"the link {target} leads nowhere"
            elif anchor and path.suffix == ".md":
                if path not in texts:
                    texts[path] = anchors(path.read_text(encoding="utf-8"))
                if anchor not in texts[path]:
                    yield number, f"the link {target}: {path.name} has no such heading"


def date_problems(page: Page):
    for number, line in page.prose + page.code:
        if page.path.name == "CHANGELOG.md" and RELEASE.match(line):
            continue
        text = re.sub(r"\]\([^)]*\)", "]", line)
        for match in DATE.finditer(text):
            yield number, f"the date {match.group(0)}: what is measured or tried on a day stands in docs/results or docs/notes"


def history_problems(page: Page):
    for number, line in page.prose:
        text = re.sub(r"\]\([^)]*\)", "]", line)
        for match in HASH.finditer(text):
            yield number, f"the commit {match.group(0)}: history is in git and in docs/notes"
        for match in HISTORY.finditer(re.sub(r"`[^`]*`", "", text)):
            yield number, f'"{match.group(0)}": a reference page states what is'


def page_problems(page: Page, kind: str, commands: Commands, texts: dict):
    yield from link_problems(page, texts)
    long = page.long_sentences() if page.path.name != "table.md" else []  # which the program writes
    for number, text in long:
        yield number, f"{count_words(text)} words in a sentence (at most {SENTENCE_WORDS}): {' '.join(text.split()[:8])} ..."
    if kind == "record":
        return
    yield from date_problems(page)
    if kind == "rules":
        return
    yield from history_problems(page)
    for number, text in page.commands():
        for problem in commands.problems(text):
            yield number, problem
    if page.words > PAGE_WORDS:
        yield 1, f"{page.words} words: a page has at most {PAGE_WORDS}"
    if page.path == ROOT / "README.md" and page.words > README_WORDS:
        yield 1, f"{page.words} words: this page has at most {README_WORDS}"


def all_pages():
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"], cwd=ROOT, check=True, capture_output=True
    ).stdout.decode()
    return sorted(name for name in names.split("\0") if name and (ROOT / name).exists() and not name.startswith("tests/"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="pages to check; without: all")
    parser.add_argument("--program", help="the built program, which is asked for its commands and options")
    parser.add_argument("--report", action="store_true", help="print words and long sentences of each page")
    arguments = parser.parse_args()
    commands = Commands(arguments.program)
    names = [pathlib.Path(file).resolve().relative_to(ROOT).as_posix() for file in arguments.files] or all_pages()
    bad = total = checked = 0
    texts = {}
    for name in names:
        kind = kind_of(name)
        if kind == "note":
            continue
        page = Page(ROOT / name)
        checked += 1
        if kind == "reference":
            total += page.words
        if arguments.report:
            print(f"{page.words:6} words {len(page.long_sentences()):3} long sentences  {name}{'  (generated)' if page.is_generated else ''}")
        for number, problem in sorted(page_problems(page, kind, commands, texts)):
            print(f"{name}:{number}: {problem}")
            bad += 1
    if not arguments.files and total > TOTAL_WORDS:
        print(f"docs: {total} words in all reference pages: at most {TOTAL_WORDS}")
        bad += 1
    print(f"docs: {checked} pages, {total} words, {bad} problems" if bad else f"docs: {checked} pages, {total} words, no problems")
    return 1 if bad or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
