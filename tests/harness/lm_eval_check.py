#!/usr/bin/env python3
"""fastweight eval beside lm-evaluation-harness, on one model: a tiny transformer of ../shared/vectors/models, which Hugging Face's LlamaForCausalLM
computes too. Every log-likelihood, every metric and every greedy output must be the harness's, to 1e-4; WikiText's detokenizer and counts exactly.

  lm_eval_check.py PROGRAM SHARED      PROGRAM: build/fastweight; SHARED: the folder with vectors/ and data/

Exits 77 (skipped, says why) where lm_eval, transformers or torch are not installed or SHARED is not there, 1 at the first difference.
"""

import json
import pathlib
import random
import subprocess
import sys
import tempfile

TOLERANCE = 1e-4
MAX_LENGTH = 64  # tokens that the model is given at once, in both


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


try:
    import datasets
    import lm_eval
    import tokenizers
    import torch
    import transformers
    from lm_eval.models.huggingface import HFLM
    from safetensors.torch import load_file
except ImportError as error:
    skip(f"{error}; pip install lm_eval transformers torch")


def llama(folder):
    """The model of a folder of flash-linear-attention's transformer, as Hugging Face computes it."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    renamed = {}
    for name, value in weights.items():
        for ours, theirs in (("embeddings", "embed_tokens"), (".attn.", ".self_attn."), ("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            name = name.replace(ours, theirs)
        renamed[name] = value
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=renamed["model.layers.0.mlp.up_proj.weight"].shape[0],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_heads"],
            num_key_value_heads=config["num_kv_heads"],
            rms_norm_eps=config["norm_eps"],
            rope_theta=config["rope_theta"],
            max_position_embeddings=config["max_position_embeddings"],
            tie_word_embeddings=config["tie_word_embeddings"],
            bos_token_id=config["bos_token_id"],
            eos_token_id=config["eos_token_id"],
        )
    )
    model.load_state_dict(renamed)
    model.eval()
    io = load_file(folder / "io.safetensors")
    with torch.no_grad():
        error = (model(io["input_ids"].long()).logits - io["logits"]).abs().max().item()
    if error > 1e-4:
        raise SystemExit(f"Hugging Face's model is another: its logits differ by {error}")
    return model


def ids_tokenizer(size):
    """Token ids as text, numbers between spaces, as fastweight's 'ids'. 1 and 2 have other names: special tokens are found inside words."""
    words = {{1: "<s>", 2: "</s>"}.get(i, str(i)): i for i in range(size)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def text(draw, count):
    return " ".join(str(draw.randrange(3, 101)) for _ in range(count))


def make_requests(draw):
    requests = []
    for i in range(20):
        context = text(draw, draw.randrange(1, 30)) + draw.choice(["", "", " ", " \n"])
        choices = [text(draw, draw.randrange(1, 8)) for _ in range(4)]
        requests.append({"task": "choices", "id": str(i), "type": "mc", "ctx": context, "choices": choices, "gold": draw.randrange(4)})
    for i in range(10):  # longer than the model is given: their left is cut
        choices = [text(draw, draw.randrange(1, 8)) for _ in range(2)]
        requests.append({"task": "long", "id": str(i), "type": "mc", "ctx": text(draw, draw.randrange(60, 90)), "choices": choices, "gold": draw.randrange(2)})
    for i in range(20):
        requests.append({"task": "last", "id": str(i), "type": "ll", "ctx": text(draw, draw.randrange(1, 40)), "cont": " " + text(draw, draw.randrange(1, 4))})
    for i, count in enumerate((1, 10, 63, 64, 65, 128, 200, 333)):
        page = text(draw, count)
        requests.append({"task": "pages", "id": str(i), "type": "rolling", "text": page, "n_words": count, "n_bytes": len(page)})
    for i in range(10):
        prompt = text(draw, draw.randrange(5, 40))
        requests.append({"task": "output", "id": str(i), "type": "gen", "prompt": prompt, "answers": ["7"], "max_gen": 8, "until": ["\n"], "metric": "contains"})
    return requests


def harness_tasks(requests, folder):
    """A task of the harness for each of ours, on the same lines."""
    shapes = {
        "choices": {"output_type": "multiple_choice", "doc_to_text": "{{ctx}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}",
                    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
        "last": {"output_type": "loglikelihood", "doc_to_text": "{{ctx}}", "doc_to_target": "{{cont}}", "target_delimiter": "",
                 "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}]},
        "pages": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                  "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}]},
        "output": {"output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answers[0]}}",
                   "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
                   "metric_list": [{"metric": "exact_match"}]},
    }
    shapes["long"] = shapes["choices"]
    tasks = []
    for name, shape in shapes.items():
        path = folder / f"{name}.json"
        path.write_text("\n".join(json.dumps(r) for r in requests if r["task"] == name))
        tasks.append({"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test", **shape})
    return tasks


def same(what, ours, theirs):
    if abs(ours - theirs) > TOLERANCE * max(1.0, abs(theirs)):
        raise SystemExit(f"{what}: fastweight has {ours}, the harness {theirs}")


def check_scores(program, shared, folder):
    model_folder = shared / "vectors/models/transformer"
    requests = make_requests(random.Random(1))
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in requests))
    subprocess.run([program, "eval", model_folder, "--requests", path, "--max-length", str(MAX_LENGTH), "--prefix-token", "1", "--out", folder / "ours"],
                   check=True, stdout=subprocess.DEVNULL)
    report = json.loads((folder / "ours/eval.json").read_text())
    samples = {}
    for line in (folder / "ours/samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        samples[sample["task"], sample["id"]] = sample

    lm = HFLM(pretrained=llama(model_folder), tokenizer=ids_tokenizer(101), max_length=MAX_LENGTH, batch_size=1, device="cpu")
    found = lm_eval.simple_evaluate(lm, tasks=harness_tasks(requests, folder), bootstrap_iters=0, log_samples=True)
    compared = 0
    for task, theirs in found["samples"].items():
        for sample in theirs:
            ours = samples[task, str(sample["doc"]["id"])]
            responses = [r[0] for r in sample["resps"]]
            if task in ("choices", "long"):
                for mine, (likelihood, _) in zip(ours["log_likelihoods"], responses, strict=True):
                    same(f"{task} {ours['id']}", mine, likelihood)
            elif task == "last":
                same(f"{task} {ours['id']}", ours["metrics"]["log_likelihood"], responses[0][0])
                same(f"{task} {ours['id']} greedy", ours["metrics"]["acc"], float(responses[0][1]))
            elif task == "pages":
                same(f"{task} {ours['id']}", ours["metrics"]["log_likelihood"], responses[0] if isinstance(responses[0], float) else responses[0][0])
            elif ours["output"].split() != responses[0].split():
                raise SystemExit(f"{task} {ours['id']}: fastweight wrote '{ours['output']}', the harness '{responses[0]}'")
            compared += 1
    if compared != len(requests):
        raise SystemExit(f"{compared} of {len(requests)} requests were compared")
    metrics = 0
    for result in report["results"]:
        for metric in result["metrics"]:
            if result["task"] == "output":
                continue
            same(f"{result['task']} {metric['name']}", metric["value"], found["results"][result["task"]][metric["name"] + ",none"])
            metrics += 1
    print(f"{compared} requests and {metrics} metrics are the harness's")


def check_wikitext(program, shared, folder):
    from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

    out = folder / "wikitext.jsonl"
    subprocess.run([program, "requests", "wikitext", "--raw", shared / "data/wikitext2_test.txt", "--out", out], check=True, stdout=subprocess.DEVNULL)
    requests = [json.loads(line) for line in out.read_text().splitlines()]
    raw = (shared / "data/wikitext2_test.txt").read_text()
    pages, begin = [], 0
    for request in requests:  # the raw pages follow from their lengths, after the blank line before the first title
        if not pages:
            begin = raw.index(" = ")
        encoded = raw[begin:].encode()[: request["n_bytes"]].decode()
        pages.append(encoded)
        begin += len(encoded)
    if begin != len(raw):
        raise SystemExit(f"WikiText: {len(raw) - begin} characters belong to no page")
    for page, request in zip(pages, requests, strict=True):
        if request["text"] != wikitext_detokenizer({"page": page}):
            raise SystemExit(f"WikiText page {request['id']}: not the harness's text")
        theirs = process_results({"page": page}, (0.0,))
        if (request["n_words"], request["n_bytes"]) != (theirs["word_perplexity"][1], theirs["byte_perplexity"][1]):
            raise SystemExit(f"WikiText page {request['id']}: {request['n_words']} words and {request['n_bytes']} bytes, the harness has {theirs}")
    print(f"{len(pages)} pages of WikiText are the harness's text, words and bytes")


def main():
    program, shared = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    if not (shared / "vectors/models/transformer").is_dir():
        skip(f"{shared} has no vectors/models/transformer")
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        datasets.config.HF_DATASETS_CACHE = folder / "cache"
        check_wikitext(program, shared, folder)
        check_scores(program, shared, folder)


if __name__ == "__main__":
    main()
