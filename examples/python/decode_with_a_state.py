"""Prefill a prompt, then decode token by token from the state, which is the whole cache: its size does not grow.

    python examples/python/decode_with_a_state.py
"""

import torch
from fastweight.torch import forward, step

torch.manual_seed(0)
PROMPT, NEW, HEADS, DIM = 100, 8, 2, 32
q, k, v = torch.randn(3, 1, PROMPT + NEW, HEADS, DIM)
g, beta = -torch.rand(1, PROMPT + NEW, HEADS), torch.rand(1, PROMPT + NEW, HEADS)


def tokens(begin, end):
    return {name: x[:, begin:end] for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))}


state = forward("gated_deltanet", **tokens(0, PROMPT), output_final_state=True).final_state
decoded = [step("gated_deltanet", **tokens(t, t + 1), state=state) for t in range(PROMPT, PROMPT + NEW)]
whole = forward("gated_deltanet", **tokens(0, PROMPT + NEW)).o
print(f"cache: {state.numel() * state.element_size()} bytes for any length")
print(f"decoded equals the whole sequence: {torch.allclose(torch.cat(decoded, 1), whole[:, PROMPT:], atol=1e-4)}")
