#!/usr/bin/env python3
"""The table of docs/gpu.md from the JSON of `make gpu-bench`, between its two marks.

    tools/gpu_table.py NAME            NAME: DATE-COMMIT of bench/results/NAME-4x4096x16.json and NAME-1x32768x16.json
    tools/gpu_table.py NAME --check    exits 1 if docs/gpu.md has another table

In brackets: how many times as fast as the peers of bench/peers/h200.json."""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- figures: begin (tools/gpu_table.py) -->", "<!-- figures: end -->"
SHAPES = ("4x4096x16", "1x32768x16")


def results(name: str, shape: str) -> list:
    path = ROOT / "bench/results" / f"{name}-{shape}.json"
    return json.loads(path.read_text(encoding="utf-8"))["recurrence"]["results"]


def time_of(result: dict, peers: dict, what: int) -> str:
    """Milliseconds, the peer's over them, the share of the roofline."""
    entry = result[("forward_ms", "forward_backward_ms")[what]]
    ms = entry["median"]
    peer = peers.get(result["rule"])
    against = f" ({peer[what] / ms:.1f}x)" if peer else ""
    return f"{ms:.3f}{against} {100 * entry['roofline']:.0f}%"


def table(name: str) -> str:
    peers = json.loads((ROOT / "bench/peers/h200.json").read_text(encoding="utf-8"))
    first, second = (results(name, shape) for shape in SHAPES)
    lines = [
        "| rule | 4x4096x16: forward | forward + backward | extra MB | 1x32768x16: forward | forward + backward | decode us, 1 | 64 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    copy = json.loads((ROOT / "bench/results" / f"{name}-{SHAPES[0]}.json").read_text(encoding="utf-8"))["recurrence"]["copy_bytes_per_s"]
    for a, b in zip(first, second, strict=True):
        if a["rule"] != b["rule"]:
            sys.exit(f"gpu_table: the two files of {name} list other rules: {a['rule']}, {b['rule']}")
        cells = [time_of(r, peers[shape], what) for r, shape in zip((a, b), SHAPES, strict=True) for what in (0, 1)]
        cells.insert(2, f"{a['extra_bytes'] / 1e6:.0f}")
        share = 100 * a["decode_64_bytes_per_s"] / copy
        decode = (f"{a['decode_us']['1']:.1f}", f"{a['decode_us']['64']:.1f} ({share:.0f}%)")
        lines.append(f"| `{a['rule']}` | " + " | ".join((*cells, *decode)) + " |")
    return "\n".join(lines)


def main() -> int:
    arguments = [a for a in sys.argv[1:] if a != "--check"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    page = ROOT / "docs/gpu.md"
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"gpu_table: expected the marks '{BEGIN}' and '{END}' once each in docs/gpu.md")
    head, rest = text.split(BEGIN)
    new = f"{head}{BEGIN}\n{table(arguments[0])}\n{END}{rest.split(END)[1]}"
    if "--check" in sys.argv[1:]:
        if new != text:
            print("docs/gpu.md: the table differs from bench/results; run tools/gpu_table.py")
            return 1
        return 0
    page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
