#!/usr/bin/env python3
"""PyTorch's scaled_dot_product_attention beside bench/cuda/attention_bench on a GPU, one JSON line a shape: bf16, [B, H, T, D] views of [B, T, H, D] rows;
medians of 20 after 5. Without a window by its default (flash-attention) and by cuDNN's kernels; a window by flex_attention compiled, if asked for with --flex.

    attention.py [--flex] [B T H HK D W]...
"""

import json
import sys

import torch
import torch.nn.functional as F
from gpu_times import median_ms
from torch.nn.attention import SDPBackend, sdpa_kernel


def time_shape(name, attend, b, t, h, hk, d, w):
    q, k, v = (torch.randn(b, t, n, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for n in (h, hk, hk))
    with torch.no_grad():
        forward = median_ms(lambda: attend(q, k, v))
    o = attend(q, k, v)
    do = torch.randn_like(o)
    backward = median_ms(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
    pairs = b * h * sum(min(i + 1, w) if w else i + 1 for i in range(t))
    print(json.dumps({"peer": name, "B": b, "T": t, "H": h, "HK": hk, "D": d, "window": w, "forward_ms": round(forward, 4), "backward_ms": round(backward, 4),
                      "forward_tflops": round(4e-9 * pairs * d / forward, 1), "backward_tflops": round(10e-9 * pairs * d / backward, 1)}), flush=True)


def main():
    arguments = [a for a in sys.argv[1:] if a != "--flex"]
    numbers = [int(a) for a in arguments]
    shapes = [numbers[i:i + 6] for i in range(0, len(numbers), 6)] or [
        [8, 2048, 16, 16, 128, 2048], [1, 16384, 16, 16, 128, 2048], [1, 16384, 16, 16, 128, 0], [1, 16384, 16, 4, 128, 0], [8, 2048, 16, 16, 64, 512], [2, 8192, 32, 32, 64, 0]]
    for b, t, h, hk, d, w in shapes:
        if w in (0, t):
            for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
                try:
                    with sdpa_kernel(backend):
                        time_shape(name, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=h != hk), b, t, h, hk, d, 0)
                except RuntimeError as error:
                    print(json.dumps({"peer": name, "B": b, "T": t, "H": h, "HK": hk, "D": d, "window": w, "error": str(error)[:120]}), flush=True)
        elif "--flex" in sys.argv:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention
            mask = create_block_mask(lambda _b, _h, i, j: (i >= j) & (i - j < w), None, None, t, t, device="cuda")
            torch._functorch.config.donated_buffer = False  # backward is timed again and again
            compiled = torch.compile(flex_attention)
            time_shape("flex", lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=h != hk), b, t, h, hk, d, w)


if __name__ == "__main__":
    main()
