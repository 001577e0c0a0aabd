"""python -m fastweight.fla_report FOLDER: the table of what fla_pytest.py kept of flash-linear-attention's tests: tests, passed, failed, skipped, not reached, calls served and not; then
every failure with its reason, and what began and did not end."""

import collections
import contextlib
import json
import pathlib
import sys

COUNTS = ("passed", "failed", "skipped", "served", "fell_back")


def lines(folder):
    for path in sorted(pathlib.Path(folder).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # one that is being written
                yield json.loads(line)


def _rows(folder):
    """{file: counts}, and the lines of what did not pass, began and did not end, or was not served."""
    every = list(lines(folder))
    rows, told, ended = collections.defaultdict(lambda: dict.fromkeys(("tests", *COUNTS), 0)), [], set()
    reasons = collections.defaultdict(collections.Counter)
    for line in every:
        for file, count in line.get("collected", {}).items():
            rows[file]["tests"] = max(count, rows[file]["tests"])
    for line in every:
        if "test" not in line or line["test"] in ended:
            continue
        ended.add(line["test"])
        file = line["test"].split("::")[0]
        rows[file][line["outcome"]] += 1
        for key in ("served", "fell_back"):
            rows[file][key] += line[key] or 0
        reasons[file].update(line["reasons"] or {})
        if line["outcome"] == "failed":
            told.append(line)
    cut = sorted({line["began"] for line in every if "began" in line} - ended)
    return rows, reasons, told, cut


def table(folder):
    rows, reasons, failures, cut = _rows(folder)
    out = ["| file | tests | passed | failed | skipped | not reached | calls served | left to FLA | |", "|---|---|---|---|---|---|---|---|---|"]
    for file, row in sorted(rows.items()):
        reached = row["passed"] + row["failed"] + row["skipped"]
        why = "; ".join(f"{count} x {reason}" for reason, count in reasons[file].most_common(4))
        out.append(f"| {file} | {row['tests']} | {row['passed']} | {row['failed']} | {row['skipped']} | {row['tests'] - reached} | {row['served']} | {row['fell_back']} | {why} |")
    for line in failures:
        out.append(f"\nfailed: {line['test']} (served {line['served']}, left {line['fell_back']}, {line['seconds']} s)\n    " + line.get("reason", "").replace("\n", "\n    "))
    out += [f"\nbegan and did not end: {test}" for test in cut]
    return "\n".join(out)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m fastweight.fla_report FOLDER    (a folder that FASTWEIGHT_FLA_REPORT named)")
    print(table(sys.argv[1]))
