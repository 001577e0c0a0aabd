#!/usr/bin/env python3
"""Prefill of a Qwen3.5-0.8B-shaped model with random bf16 weights on a GPU, in transformers with three kernels of its gated delta rule: its own in torch,
flash-linear-attention's, and this project's (fastweight.hf). Beside them the engine's prefill of as many sequences (fastweight bench). Each runs in a process
of its own, in turn, twice. Logits are made of the last token of each sequence; the state is kept (use_cache). One JSON line a process: milliseconds by events, the
median of --repeats after two.

    released_prefill.py --program build-gpu/fastweight [--batch 8] [--length 4096] [--repeats 7] [--variants torch,fla,fastweight,engine]

FASTWEIGHT_LIBRARY names the library that fastweight.torch loads.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile

VARIANTS = ("torch", "fla", "fastweight", "engine")
SIZES = {  # the program's qwen3.5-0.8b (src/model/sizes.cpp)
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}


def transformers_ms(variant, batch, length, repeats):
    if variant != "fla":
        sys.modules["fla"] = None  # transformers finds none
    import torch

    if variant == "fastweight":
        import fastweight.hf

        fastweight.hf.enable()
    import transformers
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    config = transformers.Qwen3_5TextConfig(**SIZES)
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = modeling.Qwen3_5ForCausalLM(config).eval()
    ids = torch.randint(config.vocab_size, (batch, length), device="cuda")
    times = []
    with torch.no_grad():
        for i in range(repeats + 2):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            model(ids, use_cache=True, logits_to_keep=1)
            end.record()
            end.synchronize()
            if i >= 2:
                times.append(begin.elapsed_time(end))
    row = {"transformers": transformers.__version__, "torch": torch.__version__, "fla": getattr(sys.modules.get("fla"), "__version__", None)}
    if variant == "fastweight":
        row["status"] = str(fastweight.hf.status())
    return {**row, "ms": statistics.median(times), "best_ms": min(times)}


def engine_ms(program, batch, length):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [program, "bench", "--device", "cuda", "--size", "qwen3.5-0.8b", "--prefill", str(length), "--prefill-sequences", str(batch), "--json", file.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with open(file.name) as text:
            ms = json.load(text)["generation"]["prefill"][0]["ms"]
    return {"ms": ms["median"], "best_ms": ms["best"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="the fastweight program, for the variant engine")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--alone", choices=VARIANTS, help=argparse.SUPPRESS)  # of the processes that this one starts
    options = parser.parse_args()
    variants = options.variants.split(",")
    unknown = [name for name in variants if name not in VARIANTS]
    if unknown or ("engine" in variants and not options.program):
        parser.error(f"--variants: expected names of {VARIANTS}, and --program for engine, got {options.variants}")
    if not options.alone:
        for variant in variants * 2:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--alone", variant], check=False)
        return
    if options.alone == "engine":
        row = engine_ms(options.program, options.batch, options.length)
    else:
        row = transformers_ms(options.alone, options.batch, options.length, options.repeats)
    row = {"variant": options.alone, "batch": options.batch, "length": options.length, **row}
    print(json.dumps({**row, "tok_s": 1e3 * options.batch * options.length / row["ms"]}), flush=True)


if __name__ == "__main__":
    main()
