#!/usr/bin/env python3
"""Language models of several rules at one size on one text: trained, judged by context length, tabled.

    tools/compare_models.py --text TRAIN --valid HELD_OUT --out FOLDER [--program FW] [--rules R,...] [--seeds N,...] [--more-seeds RULE,...] [--contexts N,...]
                            [--parameters N] [-- TRAIN OPTIONS]

Every rule and seed is a run, FOLDER/runs/RULE-seedN: one that is finished is not trained again, one that was stopped goes on, so that the same command, given
again, goes on where it was. What stands behind -- goes to each `fastweight train` (size, steps, device). A model of the layers `recurrent,window` with the rule R is
asked for as R+window, one of `window` or `attention` alone by that name; R+window takes `--window-window` and the like from behind --. --more-seeds: rules of
which all seeds are trained; the others have the first (without it all have all). --parameters: the MLP of each model is made as wide (a multiple of 16) as brings
its parameters nearest to N, so that models are of one size whatever gates their layers have.

Writes FOLDER/table.md and results.json: bits per byte of HELD_OUT in windows of each context that start from nothing, mean and standard deviation over seeds,
and the tokens a second of the last recorded half of training. On a GPU:

    tools/compare_models.py --text train.txt --valid valid.txt --out docs/results/lm --more-seeds gated_deltanet,kaczmarz -- --device cuda --size 340m --steps 5000
"""

import argparse
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys

RULES = "gated_deltanet,kaczmarz,gated_deltanet2,kda,qdelta,mamba2,gated_deltanet+window"


def layers_of(name: str) -> list:
    rule, _, other = name.partition("+")
    if rule in ("attention", "window"):
        return ["--layers", rule]
    return ["--rule", rule] + (["--layers", f"recurrent,{other}"] if other else [])


def options_for(a: argparse.Namespace, name: str) -> list:
    """The options behind --, but for those of layers that this model has not: `train` refuses them."""
    rule, _, other = name.partition("+")
    kept, at = [], 0
    while at < len(a.options):
        end = at + 1
        while end < len(a.options) and not a.options[end].startswith("--"):
            end += 1
        if not any(a.options[at].startswith(f"--{layer}-") and layer not in (rule, other) for layer in ("window", "attention")):
            kept += a.options[at:end]
        at = end
    return kept


def call(command: list, **more) -> str:
    done = subprocess.run(command, text=True, **more)
    if done.returncode != 0:
        sys.exit(f"compare_models: '{' '.join(command)}' ended with {done.returncode}; the same command goes on from here")
    return done.stdout or ""


def write(path: pathlib.Path, text: str) -> None:
    aside = path.with_name(path.name + ".part")
    aside.write_text(text)
    os.replace(aside, path)


def numbers(option: str, text: str) -> list:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        sys.exit(f"compare_models: {option}: expected whole numbers with commas between them, got '{text}'")
    return [int(number) for number in text.split(",")]


def parameters_of(a: argparse.Namespace, name: str, width: int) -> int:
    command = [a.program, "train", "--dry-run", "--no-check-memory", "--text", str(a.valid), "--valid", str(a.valid)] + layers_of(name) + options_for(a, name)
    command += ["--intermediate-size", str(width), "--batch", "1", "--length", "16", "--device", "cpu"]  # a dry run times a step
    return int(re.search(r"^all +(\d+)$", call(command, stdout=subprocess.PIPE), re.MULTILINE)[1])


# Parameters grow by the same number with every unit of the MLP's width. What was found is kept: a dry run draws a whole model.
def mlp_width(a: argparse.Namespace, name: str) -> list:
    if a.parameters is None:
        return []
    path = a.out / "widths.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    if [kept.get("parameters"), kept.get("options")] != [a.parameters, a.options]:
        kept = {"parameters": a.parameters, "options": a.options, "widths": {}}
    if name not in kept["widths"]:
        narrow, wider = parameters_of(a, name, 16), parameters_of(a, name, 32)
        width = 16 * round(1 + (a.parameters - narrow) / (wider - narrow))
        if width < 16:
            sys.exit(f"compare_models: --parameters: {name} has {narrow} at least with these options, more than {a.parameters}")
        kept["widths"][name] = width
        a.out.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(kept) + "\n")
    return ["--intermediate-size", str(kept["widths"][name])]


# Of a folder of safetensors: the header says the shapes.
def parameters_in(model: pathlib.Path) -> int:
    count = 0
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        count += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return count


def train(a: argparse.Namespace, name: str, seed: int) -> pathlib.Path:
    run = a.out / "runs" / f"{name}-seed{seed}"
    if (run / "model" / "config.json").exists():
        return run
    where = [arg for i, arg in enumerate(a.options) if arg.startswith("--device") or (i > 0 and a.options[i - 1] == "--device")]
    if any((run / "checkpoints").glob("step*")):
        call([a.program, "train", "--resume", "--out", str(run)] + where)
    else:
        call([a.program, "train", "--text", str(a.text), "--valid", str(a.valid), "--out", str(run), "--seed", str(seed)] + layers_of(name) + options_for(a, name) + mlp_width(a, name))
    return run


def judge(a: argparse.Namespace, run: pathlib.Path) -> dict:
    device = next((a.options[i + 1] for i, arg in enumerate(a.options[:-1]) if arg == "--device"), "cpu")
    kept = run / "contexts.json"
    found = json.loads(kept.read_text()) if kept.exists() else None
    if found is None or [r["context"] for r in found["results"]] != a.contexts:
        text = call([a.program, "eval", str(run), "--text", str(a.valid), "--context", ",".join(map(str, a.contexts)), "--json", "--device", device], stdout=subprocess.PIPE)
        write(kept, text)
        found = json.loads(text)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = [r["tokens_per_second"] for r in records[len(records) // 2 :]]
    return {
        "bits_per_byte": {r["context"]: r["bits_per_byte"] for r in found["results"]},
        "tokens_per_second": statistics.median(speeds),
        "training_tokens": records[-1]["tokens"],
        "parameters": parameters_in(run / "model"),
    }


def shown(values: list, digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def table(a: argparse.Namespace, results: dict) -> str:
    lines = [f"| model | parameters | seeds | {' | '.join(map(str, a.contexts))} | ktok/s |", "|---" * (len(a.contexts) + 4) + "|"]
    for name, runs in results.items():
        cells = [shown([r["bits_per_byte"][c] for r in runs], 4) for c in a.contexts]
        lines.append(f"| {name} | {runs[0]['parameters'] / 1e6:.2f}M | {len(runs)} | {' | '.join(cells)} | {shown([r['tokens_per_second'] / 1e3 for r in runs], 1)} |")
    options = " ".join(a.options) or "none"
    return f"Bits per byte of `{a.valid.name}` by context length; trained on `{a.text.name}`, options `{options}`.\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    arguments, options = (sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]) if "--" in sys.argv else (sys.argv[1:], [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("text", "valid", "out"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--program", default=str(pathlib.Path(__file__).resolve().parent.parent / "build" / "fastweight"))
    parser.add_argument("--rules", default=RULES)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--more-seeds", default="")
    parser.add_argument("--contexts", default="256,1024,4096")
    parser.add_argument("--parameters")
    a = parser.parse_args(arguments)
    a.options = options
    a.contexts = numbers("--contexts", a.contexts)
    a.parameters = numbers("--parameters", a.parameters)[0] if a.parameters else None
    if a.parameters is not None and "--intermediate-size" in options:
        sys.exit("compare_models: --parameters chooses the width of the MLP, which --intermediate-size says too: leave one of them out")
    seeds, more = numbers("--seeds", a.seeds), [r for r in a.more_seeds.split(",") if r]
    for path in (a.text, a.valid):
        if not path.exists():
            sys.exit(f"compare_models: '{path}' is not there")
    rules = [r for r in a.rules.split(",") if r]
    if not rules:
        sys.exit("compare_models: --rules: expected at least one, got none")
    if unknown := [r for r in more if r not in rules]:
        sys.exit(f"compare_models: --more-seeds: {', '.join(unknown)} is not among --rules")
    results = {}
    for name in rules:
        for seed in seeds if not more or name in more else seeds[:1]:
            results.setdefault(name, []).append(judge(a, train(a, name, seed)))
            write(a.out / "results.json", json.dumps({"options": a.options, "text": a.text.name, "valid": a.valid.name, "models": results}, indent=1) + "\n")
            write(a.out / "table.md", table(a, results))
    print(table(a, results))


main()
