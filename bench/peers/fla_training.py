#!/usr/bin/env python3
"""Training steps of flash-linear-attention's models on a GPU, with its own kernels and with this project's (fastweight.fla.enable()), in turn in one process: tokens/s
and the kernels' share of a step. bf16 weights, fused AdamW, random tokens, 8 x 2048 a step. One JSON line a model.

    fla_training.py [--batch 8] [--length 2048] [--steps 10] [--together FOLDER COUNT] gated_deltanet-340M kda-340M gated_deltanet-1.3B ...

With Triton 3.4 to 3.7.0 on Hopper flash-linear-attention refuses the backward of gated rules, whose numbers are wrong there; here it runs all the same, for the time.

Compiling and tuning takes minutes. Several processes do it side by side, one a model, and are timed one after the other once all are ready:
--together FOLDER COUNT, an empty folder and the number of processes.
"""

import argparse
import fcntl
import json
import pathlib
import statistics
import sys
import time

import torch

WIDTHS = {"340M": 1024, "1.3B": 2048}
# Heads as their layers' defaults have them for each width: K = 256 and V = 512, and K = V = 128; keys take 3/4 of the width and all of it.
MODELS = {
    "gated_deltanet": ("GatedDeltaNet", lambda width: {"num_hidden_layers": 21, "head_dim": 256, "num_heads": width * 3 // 4 // 256, "expand_v": 2}),
    "gated_deltanet_128": ("GatedDeltaNet", lambda width: {"num_hidden_layers": 21, "head_dim": 128, "num_heads": width * 3 // 4 // 128, "expand_v": 2}),
    "kda": ("KDA", lambda width: {"num_hidden_layers": 24, "head_dim": 128, "num_heads": width // 128, "expand_v": 1}),
    # KDA's model with GatedDeltaNet2 for its layers, since no model of theirs has that; as many layers as make it as large.
    "gdn2": ("KDA", lambda width: {"num_hidden_layers": 21, "head_dim": 128, "num_heads": width // 128, "expand_v": 1}),
}
COMMON = {"vocab_size": 32000, "max_position_embeddings": 2048}


def make(name):
    import fla.models

    kind, size = name.rsplit("-", 1)
    family, heads = MODELS[kind]
    values = {**COMMON, "hidden_size": WIDTHS[size], **heads(WIDTHS[size])}
    config = getattr(fla.models, f"{family}Config")(**values)
    torch.manual_seed(0)
    model = getattr(fla.models, f"{family}ForCausalLM")(config)
    if kind == "gdn2":
        from fla.layers.gdn2 import GatedDeltaNet2

        for i, block in enumerate(model.model.layers):
            block.attn = GatedDeltaNet2(hidden_size=config.hidden_size, head_dim=config.head_dim, num_heads=config.num_heads, layer_idx=i)
            block.attn.apply(model._init_weights)
    return model.to(device="cuda", dtype=torch.bfloat16).train()


def share(run):
    """Milliseconds of the recurrence's kernels in a step, and of all."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    names = ("chunk_", "fw::cuda", "fwd_h", "bwd_dhu", "wy_repr", "recompute_w", "solve_tril", "merge_16x16", "cumsum", "l2norm", "scaled_dot_kkt", "intra", "kda_gate", "gate_fwd", "gate_bwd")
    skip = ("cross_entropy", "conv", "rms", "layer_norm", "swiglu")
    recurrence = total = 0.0
    for event in profile.key_averages():
        time = getattr(event, "self_device_time_total", 0.0) / 1e3
        total += time
        if any(n in event.key for n in names) and not any(s in event.key for s in skip):
            recurrence += time
    return round(recurrence, 2), round(total, 2)


def alone(folder, count, name):
    """Waits for all processes and then for its turn; closing what it returns ends that."""
    (folder / f"{name}.ready").touch()
    while len(list(folder.glob("*.ready"))) < count:
        time.sleep(0.2)
    lock = open(folder / "lock", "w", encoding="utf-8")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def measure(name, args):
    import fastweight.fla
    import fla.ops.common.chunk_o

    # With some versions of Triton on Hopper their gated backward gives wrong numbers, and refuses; what is timed here is its speed (gated_deltanet).
    fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1 = True
    model = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, COMMON["vocab_size"], (args.batch, args.length), device="cuda", generator=torch.Generator("cuda").manual_seed(1))

    def step():
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    row = {"model": name, "parameters": sum(p.numel() for p in model.parameters()), "batch": args.batch, "length": args.length}
    times = {"fla": [], "fastweight": []}
    rounds, lock = 2, None
    for turn in range(1 + rounds):
        if turn == 1 and args.together:
            lock = alone(pathlib.Path(args.together[0]), int(args.together[1]), name)
        for who in times:
            fastweight.fla.enable() if who == "fastweight" else fastweight.fla.disable()
            for i in range(2 + (args.steps if turn else 0)):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                loss = step()
                end.record()
                end.synchronize()
                if turn and i >= 2:
                    times[who].append(begin.elapsed_time(end))
            if turn == rounds:
                row[f"{who}_recurrence_ms"], row[f"{who}_kernels_ms"] = share(step)
                row[f"{who}_loss"] = round(float(loss), 4)
    for who, values in times.items():
        row[f"{who}_ms"] = round(statistics.median(values), 2)
        row[f"{who}_tokens_s"] = round(args.batch * args.length / statistics.median(values) * 1e3)
    row["ratio"] = round(row["fla_ms"] / row["fastweight_ms"], 3)
    row["served"] = {name: counts for name, counts in ((n, c.served) for n, c in fastweight.fla._serving.counts.items()) if counts}
    if lock is not None:
        lock.close()
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help=f"{', '.join(MODELS)} with -{' or -'.join(WIDTHS)}")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--together", nargs=2, metavar=("FOLDER", "COUNT"))
    args = parser.parse_args()
    for name in args.models:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **measure(name, args)}), flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
