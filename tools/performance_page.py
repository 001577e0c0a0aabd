#!/usr/bin/env python3
"""Writes docs/performance.md: tables from the files of bench/.

    tools/performance_page.py            writes the page
    tools/performance_page.py --check    exits 1 if the page is not what the files give, or if bench/results has a file
                                         that no table uses and KEPT does not name

SOURCES names the file of each table. To publish a new run: add its file, change its name here, write the page, and
remove the old file."""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/performance.md"
RESULTS = "bench/results/"

# Table: file. Files of bench/ itself say no commit, so it stands here.
SOURCES = {
    "short": RESULTS + "2026-11-28-454e0e4-4x4096x16.json",
    "long": RESULTS + "2026-11-28-454e0e4-1x32768x16.json",
    "logits": RESULTS + "2026-11-28-454e0e4-logits.json",
    "wide": RESULTS + "2026-11-28-6064a76-wide.json",
    "state_space": RESULTS + "2026-11-27-0b08f4a-state-space.json",
    "fla_training": RESULTS + "2026-11-27-0b08f4a-fla-training.json",
    "engine": RESULTS + "2026-11-28-6064a76-engine.json",
    "ranks": RESULTS + "2026-11-28-6064a76-ranks-h200x2.json",
    "elementwise": RESULTS + "2026-11-28-6064a76-elementwise.json",
    "peers": "bench/peers/h200.json",
    "published": "bench/peers/published_h200.json",
    "cpu": "bench/cpu-recurrence.json",
    "cpu_train": "bench/cpu-train.json",
    "cpu_decode": "bench/cpu-decode.json",
}
CPU_COMMITS = {"cpu": "cc1b157", "cpu_train": "aa39bc7", "cpu_decode": "aa39bc7"}
# Files that pages cite and no table uses: file, who cites it.
KEPT = {
    "2026-11-25-56b7996-ranks-h100x2.json": "docs/ranks.md",
    "2026-11-26-afacf7d-wide-logits-training.json": "docs/notes (training of FLA's models, K above 128 beside FLA)",
    "2026-11-28-6064a76-decays.json": "docs/notes (decays of other strengths)",
}

METHOD = """# Performance

For users who choose hardware, a rule or a library: what calls take, beside the best published kernels.
`tools/performance_page.py` writes this page from the files of [bench](../bench/README.md); edit neither table nor figure.

- Times are medians of repeated calls with rotated inputs, in milliseconds unless a column says otherwise.
- They include gates and normalisation. They exclude Python, except where a table says PyTorch.
- Shapes are B x T x heads. Two head counts, such as 16/64, are key heads and value heads.
- K = V = 128 and tensors are bf16 unless a table says otherwise; token scalars are float32.
- "both" is a forward that saves, and the backward.
- "roofline" is the larger of bytes over the copy bandwidth of the same run and operations over 790 TFLOP/s, over the time.
- A ratio is the peer's time over ours: above 1 fastweight is faster, below 1 the peer is ahead.
- Peers of the first tables ran on the same kind of card on another day; other peers ran in the same hour.
- Medians on different cards of one kind differ by up to 4%.
- CPU times come from a virtual machine with two cores; runs there differ by up to 15%.
"""


class Files(dict):
    def __missing__(self, key: str) -> dict:
        self[key] = json.loads((ROOT / SOURCES[key]).read_text(encoding="utf-8"))
        return self[key]


def table(heads: list, rows: list) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def source(key: str, commit: str, card: str, command: str) -> str:
    return f"{card}, commit {commit}, `{command}` ([data](../{SOURCES[key]})).\n"


def shape_name(s: dict) -> str:
    return f"{s['B']}x{s['T']}x{s['H']}" + ("" if s["HV"] == s["H"] else f"/{s['HV']}")


def ratio(peer: float, ours: float) -> str:
    value = peer / ours
    return f"{value:.2f}x" if value < 1.05 else f"{value:.1f}x"


def best_peers(files: Files) -> dict:
    """(rule, shape): (forward ms, name), (both ms, name)"""
    peers: dict = {}
    for shape in ("4x4096x16", "1x32768x16"):
        for rule, (forward, both) in files["peers"][shape].items():
            peers[rule, shape] = [(forward, "published kernels"), (both, "published kernels")]
    for name, times in files["published"]["forward_ms"].items():
        rule, shape = name.split()
        peer = min((ms, who) for who, ms in times.items())
        forward, both = peers.get((rule, shape), (None, None))
        peers[rule, shape] = [min(peer, forward) if forward else peer, both]
    return peers


def recurrence(files: Files) -> str:
    peers = best_peers(files)
    text = "## Recurrence on an H200\n"
    for key in ("short", "long"):
        run = files[key]["recurrence"]
        shape = shape_name(run["shape"])
        rows = []
        for r in run["results"]:
            peer = peers.get((r["rule"], shape), [None, None])
            cells = [f"`{r['rule']}`"]
            for what, p in zip(("forward_ms", "forward_backward_ms"), peer, strict=True):
                ms = r[what]["median"]
                cells += [f"{ms:.3f}", f"{100 * r[what]['roofline']:.0f}%", f"{ratio(p[0], ms)} ({p[0]:g})" if p else ""]
            cells += [f"{r['extra_bytes'] / 1e6:.0f}", f"{r['decode_us']['1']:.1f}", f"{r['decode_us']['64']:.1f}"]
            rows.append(cells)
        text += f"\n### {shape}\n\n" + source(key, files[key]["commit"], "One " + run["gpu"], f"make gpu-bench, {run['repeats']} repeats") + "\n"
        text += table(["rule", "forward ms", "roofline", "best peer", "both ms", "roofline", "best peer", "extra MB", "decode us, 1 sequence", "64"], rows)
    text += ("\nPeers: [h200.json](../bench/peers/h200.json) and [published_h200.json](../bench/peers/published_h200.json). "
             "Extra MB are workspace and saved buffer. Decode is one token of 16 heads.\n")
    return text


def logits(files: Files) -> str:
    data, peers = files["logits"], best_peers(files)
    rows = []
    for run in data["shapes"]:
        shape = shape_name(run["shape"])
        for r in run["results"]:
            forward, both = r["forward_ms"]["median"], r["forward_backward_ms"]["median"]
            peer = peers.get((r["rule"], shape), [None, None])
            rows.append([shape, f"`{r['rule']}`", f"{forward:.3f}", f"{both:.3f}",
                         f"{ratio(peer[0][0], forward)} ({peer[0][1]} {peer[0][0]:g})" if peer[0] else "",
                         f"{ratio(peer[1][0], both)} ({peer[1][0]:g})" if peer[1] else ""])
    return ("## Gate logits and other shapes on an H200\n\n" + source("logits", data["commit"], "One " + data["gpu"], "fastweight bench --device cuda --gates logits") +
            "\nOur times include the conversion of gate logits, which the peers' times do not.\n\n" +
            table(["shape", "rule", "forward ms", "both ms", "best peer, forward", "best peer, both"], rows))


def wide(files: Files) -> str:
    data = files["wide"]
    rows = [[f"{shape_name(run['shape'])}, K = {run['shape']['K']}, V = {run['shape']['V']}", f"`{r['rule']}`", f"{r['forward_ms']['median']:.3f}",
             f"{r['forward_backward_ms']['median']:.3f}", f"{r['extra_bytes'] / 1e6:.0f}"] for run in data["shapes"] for r in run["results"]]
    return ("## K in (128, 256] on an H200\n\n" +
            source("wide", data["commit"], "One " + data["gpu"], "fastweight bench --device cuda --key-dim K --value-dim V") + "\n" +
            table(["shape", "rule", "forward ms", "both ms", "extra MB"], rows))


def state_space(files: Files) -> str:
    data = files["state_space"]
    last = {r["case"]: r for r in data["state_space"] if "here_forward_ms" in r}  # the later of two calls
    rows = []
    for case, r in last.items():
        key = r.get("K") or f"{r['N']} x {r['P']}"
        rows.append([case, f"{r['B']}x{r['T']}x{r['H']}, {key}", f"{r['here_forward_ms']:.3f}", ratio(r["peer_forward_ms"], r["here_forward_ms"]) +
                     f" ({r['peer_forward_ms']:.3f})", f"{r['here_both_ms']:.3f}", ratio(r["peer_both_ms"], r["here_both_ms"]) + f" ({r['peer_both_ms']:.3f})"])
    return ("## Beside FLA and Mamba through PyTorch\n\n" + source("state_space", data["commit"], "One " + data["gpu"], "bench/peers/state_space.py --configs 4") + "\n" +
            table(["rule", "shape", "forward ms", "peer", "both ms", "peer"], rows))


def training(files: Files) -> str:
    data = files["fla_training"]
    text = "## Training\n\n### FLA's models with fastweight's kernels\n\n" + source(
        "fla_training", data["library"], data["gpu"].replace("NVIDIA H200 (", "One NVIDIA H200 ("), "bench/peers/fla_training.py --batch 8 --steps 10") + "\n"
    text += table(["model", "FLA tokens/s", "fastweight tokens/s", "ratio", "recurrence ms, FLA", "fastweight"],
                  [[r["model"], f"{r['fla_tokens_s']:,}", f"{r['fastweight_tokens_s']:,}", f"{r['ratio']:.2f}x", f"{r['fla_recurrence_ms']:.1f}",
                    f"{r['fastweight_recurrence_ms']:.1f}"] for r in data["results"]])
    data = files["engine"]
    steps = [r for r in data["results"] if "ktok_s" in r]
    text += "\n### The engine's steps\n\n" + source("engine", data["commit"], "One " + data["gpu"], "fastweight bench --train --device cuda") + "\n"
    text += table(["model", "tokens", "ktok/s", "step over its products", "peak GiB"],
                  [[r["model"], r["shape"], f"{r['ktok_s']:.1f}", f"{r['step_over_products']:.2f}", f"{r['peak_gib']:.1f}"] for r in steps])
    data = files["ranks"]
    text += "\n### Two GPUs\n\n" + source("ranks", data["commit"], data["gpu"], data["command"]) + "\n"
    text += table(["run", "model", "tokens", "sums", "ktok/s", "share of sending"],
                  [[r["run"], r["model"], r["shape"], r["sums"] or "", f"{r['ktok_s']:.1f}",
                    f"{100 * r['sending_share']:.1f}%" if r["sending_share"] is not None else ""] for r in data["results"]])
    return text


def decoding(files: Files) -> str:
    data = files["engine"]
    rows = [[r["model"], str(r["sequences"]), str(r["seen"]), f"{r['tok_s']:,.0f}"] for r in data["results"] if "tok_s" in r]
    return ("## Decoding with the engine\n\n" + source("engine", data["commit"], "One " + data["gpu"], "fastweight bench --decode-sequences 1,8,16,64 --decode-seen 512,2048 --device cuda") +
            "\n" + table(["model", "sequences", "tokens seen", "tokens/s"], rows))


def elementwise(files: Files) -> str:
    data = files["elementwise"]
    copy = next(r["GB_s"] for r in data["results"] if r["operation"] == "copy")
    rows = [[r["operation"], f"{r['MB']:.0f}", f"{r['ms']:.3f}", f"{r['GB_s']:,.0f}", f"{r['GB_s'] / copy:.2f}"] for r in data["results"]]
    return ("## Elementwise operations on an H200\n\n" + source("elementwise", data["commit"], "One " + data["gpu"], "build/elementwise_bench") + "\n" +
            table(["operation", "MB", "ms", "GB/s", "of the copy"], rows))


def cpu(files: Files) -> str:
    run = files["cpu"]["recurrence"]
    card = "Two cores of an AMD EPYC (Zen 5, AVX-512)"
    text = "## CPU\n\n### Recurrence\n\n" + source("cpu", CPU_COMMITS["cpu"], card, "fastweight bench --json bench/cpu-recurrence.json")
    text += f"B = 1, T = {run['shape']['T']}, 16 heads of 128, float32, microseconds a token.\n\n"
    text += table(["rule", "forward us", "both us", "backward over forward", "decode us"],
                  [[f"`{r['rule']}`"] + [f"{r[k]['median']:.1f}" for k in ("forward_us_per_token", "forward_backward_us_per_token", "backward_over_forward",
                                                                         "decode_us_per_token")] for r in run["results"]])
    train = files["cpu_train"]["train"]
    text += "\n### Training\n\n" + source("cpu_train", CPU_COMMITS["cpu_train"], card, "fastweight bench --train --json bench/cpu-train.json") + "\n"
    text += table(["model", "tokens", "precision", "tokens/s", "peak MB"],
                  [[train["model"], f"{train['batch']}x{train['length']}", r["precision"], f"{r['tokens_per_second']['median']:,.0f}", f"{r['peak_bytes'] / 1e6:.0f}"]
                   for r in train["results"]])
    decode = files["cpu_decode"]["decode"]
    text += "\n### Decoding\n\n" + source("cpu_decode", CPU_COMMITS["cpu_decode"], card, "fastweight bench --decode-model --json bench/cpu-decode.json") + "\n"
    text += table(["model", "at token", "us a token", "resident MB"],
                  [[decode["model"], f"{decode[k]['at_token']:,}", f"{decode[k]['us_per_token']['median']:.1f}", f"{decode[k]['resident_bytes'] / 1e6:.1f}"]
                   for k in ("first", "last")])
    return text


def page() -> str:
    files = Files()
    parts = (recurrence, logits, wide, state_space, training, decoding, elementwise, cpu)
    return METHOD + "\n" + "\n".join(part(files) for part in parts)


def main(arguments: list) -> int:
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    text = page()
    if not arguments:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    used = {pathlib.Path(path).name for path in SOURCES.values()}
    extra = sorted(p.name for p in (ROOT / RESULTS).glob("*.json") if p.name not in used and p.name not in KEPT)
    if extra:
        print(f"performance_page: {RESULTS}: expected files that SOURCES or KEPT name, got besides: {', '.join(extra)}")
    same = PAGE.read_text(encoding="utf-8") == text
    if not same:
        print("performance_page: docs/performance.md differs from what the files give; run tools/performance_page.py")
    return 0 if same and not extra else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
