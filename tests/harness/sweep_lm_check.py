#!/usr/bin/env python3
"""`fastweight sweep lm` on models of a few steps: every kind of layer, a table of what eval says, no run trained twice, one that was stopped goes on, errors
before any work.

  sweep_lm_check.py PROGRAM"""

import datetime
import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile

program = sys.argv[1]
SIZE = "--hidden-size 32 --num-hidden-layers 2 --num-heads 1 --head-dim 32 --steps 6 --warmup 1 --batch 2 --length 32 --checkpoint-every 3 --threads 1".split()


def sweep(folder, *more, out="lm", size=SIZE):
    command = [program, "sweep", "lm", "--text", folder / "t.txt", "--valid", folder / "v.txt", "--out", folder / out, *more, *size]
    return subprocess.run(list(map(str, command)), text=True, capture_output=True)


def runs_of(folder, out="lm"):
    return json.loads((folder / out / "results.json").read_text())["runs"]


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    folder.joinpath("t.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    folder.joinpath("v.txt").write_text("A lazy fox. " * 40)
    models = ["--models", "kaczmarz,gated_deltanet+window,attention", "--window-window", "16", "--contexts", "16,64"]

    for more, words in ((["--contexts", "16,x"], "--contexts"), (["--seeds", "one"], "--seeds"), (["--lr", "0"], "--lr: expected numbers > 0"),
                        (["--parameters", "100"], "at least with these options, more than 100"), (["--models", "kda,kda"], "'kda-lr0.002-seed1' is named twice"),
                        (["--models", "nothing"], "nothing"), (["--parameters", "40000", "--hidden-ratio", "2"], "--hidden-ratio: expected no such option"),
                        (["--base", "kda"], "--base: expected one of --models")):
        refused = sweep(folder, *models, *more)
        assert refused.returncode == 2 and words in refused.stderr, (more, refused.stderr)
    refused = sweep(folder, "--models", "kda", "--window-window", "16")
    assert refused.returncode == 2 and "--window-window" in refused.stderr, refused.stderr
    assert not (folder / "lm").exists(), "work was done before the error"

    first = sweep(folder, *models, "--seeds", "1,2", "--lr", "1e-3,2e-3")
    assert first.returncode == 0, first.stdout + first.stderr
    runs = runs_of(folder)
    assert [(r["model"], r["lr"], r["seed"]) for r in runs] == [
        (model, lr, seed) for model in ("kaczmarz", "gated_deltanet+window", "attention") for lr in (1e-3, 2e-3) for seed in (1, 2)], runs
    one = folder / "lm/runs/attention-lr0.001-seed1"
    eval_of = subprocess.run([program, "eval", one, "--text", folder / "v.txt", "--context", "16,64", "--json"], text=True, capture_output=True, check=True)
    expected = [(r["context"], r["loss"], r["bits_per_byte"]) for r in json.loads(eval_of.stdout)["results"]]
    found = next(r for r in runs if r["model"] == "attention" and r["lr"] == 1e-3 and r["seed"] == 1)
    assert [(c["context"], c["loss"], c["bits_per_byte"]) for c in found["contexts"]] == expected, (found, expected)
    assert found["contexts"][0]["perplexity"] == math.exp(expected[0][1]) and found["training_tokens"] == 6 * 2 * 32
    assert found["state_bytes_token"] > 0 and runs[0]["state_bytes_token"] == 0 and runs[0]["state_bytes"] > 0
    for run, layers in (("gated_deltanet+window-lr0.002-seed1", ["recurrent", "window"]), ("attention-lr0.002-seed2", ["attention"])):
        assert json.loads((folder / "lm/runs" / run / "model/config.json").read_text())["layers"] == layers, run
    text = (folder / "lm/table.md").read_text()
    assert text.count("\n| ") == 7 and " ± " in text.split("kaczmarz |")[1].split("\n")[0], text
    if shutil.which("gnuplot"):
        picture = (folder / "lm/contexts.svg").read_text()
        for label in ("kaczmarz, lr 0.001", "attention, lr 0.002", "bits per byte", "context (tokens)"):
            assert label in picture, (label, first.stdout)
        assert (folder / "lm/contexts.png").stat().st_size > 1000
    page = subprocess.run([program, "report", folder / "lm", "--out", folder / "page"], text=True, capture_output=True)
    assert page.returncode == 0 and "gated\\_deltanet+window" in (folder / "page.md").read_text().replace("gated_deltanet+window", "gated\\_deltanet+window"), page.stderr

    made_by = (one / "config.toml").read_text().split("\n# Made by ")[1].split("\n")[0]
    assert made_by.startswith("fastweight ") and all(r["provenance"]["program"] == made_by for r in runs), (made_by, runs)
    assert f"Provenance: program {made_by}, device " in (folder / "page.md").read_text(), (folder / "page.md").read_text()
    today = datetime.datetime.now(datetime.timezone.utc).date()
    for provenance in (r["provenance"] for r in runs):
        assert provenance["command"].startswith("fastweight sweep lm --text ") and provenance["device"], provenance
        assert abs(datetime.date.fromisoformat(provenance["date"]) - today).days <= 1, provenance

    # The loss of the training: all records of a short run.
    records = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    losses = {r["step"]: r["loss"] for r in records if "loss" in r}
    training = found["training"]
    assert training["records"] == len(losses) and [p["step"] for p in training["curve"]] == sorted(losses), (training, losses)
    assert math.isclose(training["loss"], sum(losses.values()) / len(losses), rel_tol=1e-9) and "| train loss |" in text, (training, text)

    # A run without its model, but with checkpoints, was stopped: it goes on and ends as it did. The others are not touched.
    stopped = folder / "lm/runs/kaczmarz-lr0.002-seed2"
    shutil.rmtree(stopped / "model")
    shutil.rmtree(stopped / "checkpoints/step-6")
    (stopped / "judged.json").unlink()
    again = sweep(folder, *models, "--seeds", "1,2", "--lr", "1e-3,2e-3")
    assert again.returncode == 0, again.stdout + again.stderr
    same = lambda list_of: [{key: value for key, value in r.items() if key not in ("tokens_per_second", "provenance")} for r in list_of]
    assert same(runs_of(folder)) == same(runs)
    assert again.stdout.count(": finished\n") == 11, again.stdout

    # What an earlier version judged lacks both; the training's loss is read again, the device stays unknown. A base model adds columns.
    kept = one / "judged.json"
    judged = json.loads(kept.read_text())
    old = {key: value for key, value in judged.items() if key not in ("training", "provenance")} | {"program": made_by}
    kept.write_text(json.dumps(old))
    based = sweep(folder, *models, "--seeds", "1,2", "--lr", "1e-3,2e-3", "--base", "kaczmarz")
    assert based.returncode == 0, based.stdout + based.stderr
    newest = next(r for r in runs_of(folder) if r["model"] == "attention" and r["lr"] == 1e-3 and r["seed"] == 1)
    assert newest["training"] == training and newest["provenance"] == {"program": made_by, "command": "", "device": "", "date": ""}, newest
    text = (folder / "lm/table.md").read_text()
    assert f"program {made_by}, device several, date several, command several" in text and "| from kaczmarz at 64 |" in text, text
    kept.write_text(json.dumps(judged))
    other = sweep(folder, *models, "--seeds", "1,2", "--lr", "1e-3,2e-3", size=[*SIZE, "--clip", "2"])
    assert other.returncode == 2 and "was begun with other settings" in other.stderr, other.stderr

    # Every kind of layer, at one size: what differs is less than half a step of the MLP's width, 16 units of 3 matrices of 32 in 2 layers.
    kinds = "kaczmarz,comba,ssd,mamba,mamba3,longhorn_diag,rwkv7,mesa,attention"
    sized = sweep(folder, "--models", kinds, "--parameters", "60000", "--contexts", "32", "--mamba3-head-dim", "16", "--rwkv7-head-dim", "16", "--ssd-head-dim", "16", out="sized",
                  size=[*SIZE, "--steps", "1"])
    assert sized.returncode == 0, sized.stdout + sized.stderr
    for run in runs_of(folder, "sized"):
        assert abs(run["parameters"] - 60000) <= 16 * 3 * 32 * 2 / 2, run
    assert len(runs_of(folder, "sized")) == 9
print("sweep lm: the same as eval, and it goes on where it was")
