#!/usr/bin/env python3
"""How data-parallel training grows with ranks and width: a small simulation of src/train/data_parallel.cpp (docs/ranks.md).

    tools/ranks_time.py [--flops F] [--bandwidth B] [--tokens T] [--step-tokens G] [--jitter J] [--latency S] [--memory M]

A step has G tokens in batches of T, or of fewer where there would be less than a batch for each rank. Batch b runs on rank b mod N; behind every round of N batches each rank sends each other one its part of the gradient
(4 bytes a parameter), adds what it gets, and behind the last all gather the values. Each rank computes 6 operations a parameter and token at F a second, with
a relative spread J from batch to batch; a round begins when the slowest rank is done. Sending takes S a message and B bytes a second in each direction, as many
messages at a time as there are ranks. AdamW and the sums move M bytes a second. Nothing overlaps, as in the program.

Prints, by parameters and ranks, the speed-up over one rank, its share of N, and the bytes that a rank sends in a step; and from how many ranks on more of
their time is lost than used, where data parallel stops paying."""

import argparse
import random

WIDTHS = {512: 20e6, 1024: 115e6, 2048: 1.25e9, 4096: 6.9e9}  # parameters of models that wide, with 12 to 48 layers
RANKS = [1, 2, 4, 8, 16, 32, 64, 128]


def batches_of(ranks: int, a: argparse.Namespace) -> int:
    return max(ranks, round(a.step_tokens / a.tokens))


def step_seconds(parameters: float, ranks: int, a: argparse.Namespace, draw: random.Random) -> float:
    batches = batches_of(ranks, a)
    compute = 6 * parameters * a.step_tokens / batches / a.flops
    exchange = 4 * parameters * (ranks - 1) / ranks / a.bandwidth + (ranks - 1) * a.latency
    seconds = 0.0
    for first in range(0, batches, ranks):
        active = min(ranks, batches - first)
        slowest = max(compute * max(0.0, draw.gauss(1.0, a.jitter)) for _ in range(active))
        add = 12 * parameters / ranks * active / a.memory  # reads two, writes one
        seconds += slowest + exchange + add
    update = 28 * parameters / ranks / a.memory
    return seconds + update + exchange


def bytes_sent(parameters: float, ranks: int, batches: int) -> float:
    rounds = -(-batches // ranks)
    return 4 * parameters * (ranks - 1) / ranks * (rounds + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flops", type=float, default=4e14, help="operations a second of a rank (4e14: an H100 at 40%%)")
    parser.add_argument("--bandwidth", type=float, default=3.7e11, help="bytes a second of a rank in each direction (3.7e11: NVLink 4)")
    parser.add_argument("--tokens", type=float, default=16384, help="of a batch at most")
    parser.add_argument("--step-tokens", type=float, default=524288)
    parser.add_argument("--jitter", type=float, default=0.02)
    parser.add_argument("--latency", type=float, default=1e-5)
    parser.add_argument("--memory", type=float, default=2.5e12)
    a = parser.parse_args()
    print("| width | parameters | " + " | ".join(f"{n}" for n in RANKS[1:]) + " | stops paying at |")
    print("|---|---|" + "---|" * len(RANKS))
    for width, parameters in WIDTHS.items():
        draw = random.Random(1)
        seconds = {n: sum(step_seconds(parameters, n, a, draw) for _ in range(20)) / 20 for n in RANKS}
        cells = []
        for n in RANKS[1:]:
            speed = seconds[1] / seconds[n]
            cells.append(f"{speed:.1f} ({100 * speed / n:.0f}%), {bytes_sent(parameters, n, batches_of(n, a)) / 1e9:.3g} GB")
        stop = next((n for n in RANKS if seconds[1] / seconds[n] < n / 2), None)
        print(f"| {width} | {parameters / 1e6:.0f}M | " + " | ".join(cells) + f" | {stop if stop else 'more than 128'} |")


if __name__ == "__main__":
    main()
