#!/usr/bin/env python3
"""The table of named rules in docs/rules/README.md, from src/rule/presets.def, so that it cannot go stale.

    tools/readme_table.py            writes the table into the page, between its two marks
    tools/readme_table.py --check    exits 1 if the page has another table

The page says that every rule runs forward, backward and token by token on CPUs and on GPUs. CPU: the tests and `fastweight selftest`
check every line of presets.def against the reference. GPU: tests/cuda/forms_test.cpp, step_test.cpp and dplr_test.cpp loop over
the same list, on a GPU and in the emulation; the table is refused if one of them does not. Each rule's page must exist."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/rules/README.md"
BEGIN, END = "<!-- rules: begin (tools/readme_table.py) -->", "<!-- rules: end -->"


def escaped(text: str) -> str:
    """A bar would end the cell."""
    return text.replace("|", "\\|")


def link(name: str) -> str:
    """A rule's page, or its section in the page of the rule that it varies: kda_neg is a section of kda.md."""
    if (PAGE.parent / f"{name}.md").is_file():
        return f"{name}.md"
    base = name.removesuffix("_neg")
    if base != name and f"## {name}" in (PAGE.parent / f"{base}.md").read_text(encoding="utf-8"):
        return f"{base}.md#{name}"
    sys.exit(f"readme_table: expected a page docs/rules/{name}.md, or a section of that name in its base rule's page, found neither")


def table() -> str:
    rules = re.findall(r'^FW_PRESET\((\w+), "([^"]*)", "([^"]*)"\)', (ROOT / "src/rule/presets.def").read_text(encoding="utf-8"), re.MULTILINE)
    if not rules:
        sys.exit("readme_table: found no FW_PRESET line in src/rule/presets.def")
    for test in ("forms_test.cpp", "step_test.cpp", "dplr_test.cpp"):
        if "all_rules()" not in (ROOT / "tests/cuda" / test).read_text(encoding="utf-8"):
            sys.exit(f"readme_table: tests/cuda/{test} does not loop over all_rules(): the page would say more than is tested")
    lines = ["| rule | in one line |", "|---|---|"]
    for name, _, summary in rules:
        lines.append(f"| [`{name}`]({link(name)}) | {escaped(summary)} |")
    return "\n".join(lines)


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    where = PAGE.relative_to(ROOT)
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"readme_table: expected the marks '{BEGIN}' and '{END}' once each in {where}")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    new = f"{head}{BEGIN}\n{table()}\n{END}{tail}"
    if sys.argv[1:] == ["--check"]:
        if new != text:
            print(f"{where}: the table of rules differs from src/rule/presets.def; run tools/readme_table.py")
            return 1
        print(f"{where}: the table of rules is up to date")
        return 0
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
