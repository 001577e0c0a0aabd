#!/usr/bin/env python3
"""tools/compare_models.py on models of a few steps: a table of what eval says, no run trained twice, one that was stopped goes on, errors before any work.

  compare_models_check.py PROGRAM TOOL"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

program, tool = sys.argv[1:]
SIZE = "--hidden-size 32 --num-hidden-layers 2 --num-heads 1 --head-dim 32 --steps 6 --warmup 1 --batch 2 --length 32 --window-window 16 --checkpoint-every 3 --threads 1".split()


def compare(folder, *more, size=SIZE):
    command = [sys.executable, tool, "--program", program, "--text", folder / "t.txt", "--valid", folder / "v.txt", "--out", folder / "lm", *more, "--", *size]
    return subprocess.run(list(map(str, command)), text=True, capture_output=True)


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    folder.joinpath("t.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    folder.joinpath("v.txt").write_text("A lazy fox. " * 40)
    rules = ["--rules", "kaczmarz,gated_deltanet+window,attention", "--contexts", "16,64"]

    refused = compare(folder, *rules, "--more-seeds", "kda")
    assert refused.returncode != 0 and "kda is not among --rules" in refused.stderr, refused.stderr
    for option, value in (("--contexts", "16,x"), ("--seeds", "one"), ("--seeds", "1,,2"), ("--parameters", "40M")):
        refused = compare(folder, *rules, option, value)
        assert refused.returncode != 0 and f"{option}: expected whole numbers" in refused.stderr and f"got '{value}'" in refused.stderr, refused.stderr
    refused = compare(folder, *rules, "--parameters", "100")
    assert refused.returncode != 0 and "at least with these options, more than 100" in refused.stderr, refused.stderr
    assert not (folder / "lm").exists(), "work was done before the error"

    first = compare(folder, *rules, "--seeds", "1,2", "--more-seeds", "kaczmarz")
    assert first.returncode == 0, first.stdout + first.stderr
    models = json.loads((folder / "lm/results.json").read_text())["models"]
    assert {rule: len(runs) for rule, runs in models.items()} == {"kaczmarz": 2, "gated_deltanet+window": 1, "attention": 1}, models
    eval_of = subprocess.run([program, "eval", folder / "lm/runs/attention-seed1", "--text", folder / "v.txt", "--context", "16,64", "--json"], text=True, capture_output=True, check=True)
    assert {str(r["context"]): r["bits_per_byte"] for r in json.loads(eval_of.stdout)["results"]} == models["attention"][0]["bits_per_byte"]
    assert models["attention"][0]["training_tokens"] == 6 * 2 * 32
    for run, layers in (("gated_deltanet+window-seed1", ["recurrent", "window"]), ("attention-seed1", ["attention"])):
        assert json.loads((folder / "lm/runs" / run / "model/config.json").read_text())["layers"] == layers, run
    text = (folder / "lm/table.md").read_text()
    assert text.count("\n| ") == 4 and " ± " in text.split("kaczmarz |")[1].split("\n")[0], text

    # A run without its model, but with checkpoints, was stopped: it goes on and ends as it did. The others are not touched.
    shutil.rmtree(folder / "lm/runs/kaczmarz-seed2/model")
    shutil.rmtree(folder / "lm/runs/kaczmarz-seed2/checkpoints/step-6")
    (folder / "lm/runs/kaczmarz-seed2/contexts.json").unlink()
    again = compare(folder, *rules, "--seeds", "1,2", "--more-seeds", "kaczmarz")
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads((folder / "lm/results.json").read_text())["models"]["kaczmarz"][1]["bits_per_byte"] == models["kaczmarz"][1]["bits_per_byte"]
    assert "attention-seed1" not in again.stdout, "a finished run was trained again:\n" + again.stdout

    # One size: what differs is less than half a step of the MLP's width, 16 units of 3 matrices of 32 in 2 layers.
    sized = compare(folder, *rules, "--parameters", "40000", "--out", folder / "sized", size=[*SIZE, "--steps", "1"])
    assert sized.returncode == 0, sized.stdout + sized.stderr
    for rule, runs in json.loads((folder / "sized/results.json").read_text())["models"].items():
        assert abs(runs[0]["parameters"] - 40000) <= 16 * 3 * 32 * 2 / 2, (rule, runs[0]["parameters"])
print("compare_models: the same as eval, and it goes on where it was")
