#!/usr/bin/env python3
"""PyTorch's scaled_dot_product_attention on the processor, the shapes of bench/attention_cpu_bench.cpp: medians in milliseconds of
float32, one sequence, 8 heads of 64, T = 2048, causal, and with a mask that is a window of 512.

    attention_cpu.py [THREADS] [REPEATS]     (PyTorch 2.9; see bench/README.md)
"""

import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

TOKENS, HEADS, DIM = 2048, 8, 64


def median_ms(call, repeats):
    times = []
    call()
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def main():
    threads, repeats = (int(sys.argv[i]) if len(sys.argv) > i else standard for i, standard in ((1, 2), (2, 15)))
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, TOKENS, HEADS, DIM).transpose(1, 2).requires_grad_() for _ in range(3))
    gradient = torch.randn_like(q)
    place = torch.arange(TOKENS)
    distance = place[:, None] - place[None, :]
    for window in (0, 512):
        how = {"is_causal": True} if window == 0 else {"attn_mask": (distance >= 0) & (distance < window)}

        def forward():
            with torch.no_grad():
                F.scaled_dot_product_attention(q, k, v, **how)

        def both():
            torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, **how), (q, k, v), gradient)

        print(json.dumps({"T": TOKENS, "heads": HEADS, "dim": DIM, "window": window, "threads": threads, "forward_ms": round(median_ms(forward, repeats), 2),
                          "forward_backward_ms": round(median_ms(both, repeats), 2)}), flush=True)


if __name__ == "__main__":
    main()
