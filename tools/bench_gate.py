#!/usr/bin/env python3
"""Compares two result files of `fastweight bench --json` and refuses slowdowns.

    tools/bench_gate.py OLD.json NEW.json [--rows TEXT,...] [--limit PERCENT]

A row is a measured median: its name is the path of names in the file, such as
4x4096x16,K128,V128 gated_deltanet forward_ms. --rows keeps the rows whose name contains one of the texts.
Prints a table. Exit status: 0, or 1 if a row became slower by more than the limit (3 percent) or is missing
from NEW, or 2 if nothing can be compared."""

import argparse
import json
import pathlib
import sys

LESS = ("_ms", "_us", "us_per_token", "ms_per_step", "ms_per_token", "us", "ms")  # the last part of names of times
MORE = ("tok_s", "ktok_s", "tokens_per_second")  # of rates
NAMES = ("model", "rule", "operation", "case", "function", "what", "shape", "memory", "precision", "sequences", "seen")


def shape_text(shape: object) -> str:
    if not isinstance(shape, dict):
        return str(shape)
    return f"{shape['B']}x{shape['T']}x{shape['H']}" + (f"/{shape['HV']}" if shape.get("HV") not in (None, shape["H"]) else "") + \
        f",K{shape['K']},V{shape['V']}"


def rows(value: object, name: str = "", context: str = "") -> dict:
    """Name of each measured row: (time or rate, whether more is better)."""
    found: dict = {}
    if isinstance(value, list):
        for entry in value:
            found.update(rows(entry, name, context))
    elif isinstance(value, dict):
        if isinstance(value.get("median"), (int, float)):
            value = value["median"]
        else:
            own = [shape_text(value[k]) for k in NAMES if k in value and value[k] not in ("", None)]
            if value.get("gates") == "logits":
                own.append("logits")
            if value.get("decay_scale", 1.0) != 1.0:
                own.append(f"decay_scale={value['decay_scale']}")
            inner = " ".join([context, *own]).strip()
            for key, entry in value.items():
                if key in NAMES or key in ("beside", "start_s"):
                    continue
                if key.isdigit():  # decode_us: {"1": ..., "64": ...}
                    if isinstance(entry, (int, float)):
                        found[f"{inner} {name} {key}".strip()] = (float(entry), False)
                    continue
                found.update(rows(entry, key, inner))
            return found
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if name.endswith(LESS):
            found[f"{context} {name}".strip()] = (float(value), False)
        elif name.endswith(MORE):
            found[f"{context} {name}".strip()] = (float(value), True)
    return found


def compare(old: dict, new: dict, texts: list, limit: float) -> tuple:
    """The table's lines, and whether NEW is refused."""
    names = [n for n in old if not texts or any(t in n for t in texts)]
    lines, refused = ["| row | old | new | change | |", "|---|---|---|---|---|"], False
    for row in names:
        before, rate = old[row]
        if row not in new:
            lines.append(f"| {row} | {before:.4g} | missing | | REFUSED |")
            refused = True
            continue
        after = new[row][0]
        slower = (before / after if rate else after / before) - 1 if before > 0 and after > 0 else 0.0
        bad = slower > limit / 100
        refused = refused or bad
        lines.append(f"| {row} | {before:.4g} | {after:.4g} | {100 * slower:+.1f}% | {'REFUSED' if bad else ''} |")
    return lines, refused, len(names)


def main(arguments: list) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--rows", default="", help="texts with commas between: rows whose name contains one of them")
    parser.add_argument("--limit", type=float, default=3.0, help="percent")
    options = parser.parse_args(arguments)
    old, new = (rows(json.loads(path.read_text(encoding="utf-8"))) for path in (options.old, options.new))
    lines, refused, count = compare(old, new, [t for t in options.rows.split(",") if t], options.limit)
    if count == 0:
        print(f"bench_gate: {options.old}: expected rows with --rows {options.rows!r}, got none of {len(old)}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    print(f"{count} rows, limit {options.limit:g}% slower (+): {'refused' if refused else 'accepted'}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
