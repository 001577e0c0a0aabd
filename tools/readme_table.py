#!/usr/bin/env python3
"""The README's table of rules, from src/rule/presets.def, so that it cannot go stale.

    tools/readme_table.py            writes the table into README.md, between its two marks
    tools/readme_table.py --check    exits 1 if README.md has another table

CPU: the tests and `fastweight selftest` check every line of presets.def, forward, backward and step, against the
reference, so a rule that is in the list works there. GPU: tests/cuda/forms_test.cpp and step_test.cpp (dplr_test.cpp for erases before the decay) loop
over the same list, on a GPU and in the emulation, and the table says so only while they do."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- rules: begin (tools/readme_table.py) -->", "<!-- rules: end -->"


def escaped(text: str) -> str:
    """A bar would end the cell."""
    return text.replace("|", "\\|")


def table() -> str:
    rules = re.findall(r'^FW_PRESET\((\w+), "([^"]*)", "([^"]*)"\)', (ROOT / "src/rule/presets.def").read_text(encoding="utf-8"), re.MULTILINE)
    if not rules:
        sys.exit("readme_table: found no FW_PRESET line in src/rule/presets.def")
    for test in ("forms_test.cpp", "step_test.cpp", "dplr_test.cpp"):
        if "all_rules()" not in (ROOT / "tests/cuda" / test).read_text(encoding="utf-8"):
            sys.exit(f"readme_table: tests/cuda/{test} does not loop over all_rules(): the GPU columns would say more than is tested")
    lines = ["| rule | | CPU forward | CPU backward | CPU decode | GPU forward | GPU backward | GPU decode |", "|---|---|---|---|---|---|---|---|"]
    for name, _, summary in rules:
        lines.append(f"| `{name}` | {escaped(summary)} | yes | yes | yes | yes | yes | yes |")
    return "\n".join(lines)


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"readme_table: expected the marks '{BEGIN}' and '{END}' once each in README.md")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    new = f"{head}{BEGIN}\n{table()}\n{END}{tail}"
    if sys.argv[1:] == ["--check"]:
        if new != text:
            print("README.md: the table of rules differs from src/rule/presets.def; run tools/readme_table.py")
            return 1
        print("README.md: the table of rules is up to date")
        return 0
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
