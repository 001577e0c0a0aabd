"""Trains a Transformer of the size of `fastweight bench --train` in PyTorch on this machine and prints its tokens/s: what a
user would take instead. 4 layers, width 192, 3 heads of 64, SwiGLU of 512, bytes, 16 x 256 tokens a step, AdamW.

    python bench/peers/transformer.py [--threads 2] [--steps 20]     (PyTorch 2.9; see bench/README.md)"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, cos, sin):
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(B, T, D))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Transformer(nn.Module):
    def __init__(self, layers=4, width=192, heads=3, inner=512, vocab=256, length=256):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), 10000 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids, targets):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def step_times(bf16: bool, compiled: bool, steps: int) -> list[float]:
    torch.manual_seed(1)
    model = Transformer()
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    times = []
    for step in range(5 + steps):
        text = torch.randint(97, 123, (16, 257))
        begin = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = run(text[:, :-1], text[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        if step >= 5:
            times.append(time.perf_counter() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="with torch.compile too (needs a C++ compiler)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"PyTorch {torch.__version__}, {arguments.threads} threads, Transformer of 4 layers, width 192; 16 x 256 tokens a step")
    for compiled in (False, True) if arguments.compile else (False,):
        for bf16 in (False, True):
            times = step_times(bf16, compiled, arguments.steps)
            name = ("bf16" if bf16 else "f32") + (", compiled" if compiled else "")
            print(f"{name:16s} {4096 / statistics.median(times):8.0f} tokens/s median  {4096 / min(times):8.0f} best")


if __name__ == "__main__":
    main()
