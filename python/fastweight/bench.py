"""python -m fastweight.bench: time of forward, and of forward with backward, of these kernels and of an installed flash-linear-attention, in one run and
interleaved, on the same tensors; with --host what a call costs beside computing (host.py). --json FILE keeps the numbers, --plot FILE draws them (matplotlib). A function that FLA cannot run here (its kernels need
a GPU) has no time of theirs."""

import argparse
import importlib
import json
import statistics
import sys
import time


def _inputs(name, shape, dtype, device, torch):
    B, T, H, D, V = shape
    generator = torch.Generator(device="cpu").manual_seed(0)

    def normal(*size):
        return torch.randn(size, generator=generator).to(device=device, dtype=dtype)

    q, k, v = normal(B, T, H, D), torch.nn.functional.normalize(normal(B, T, H, D).float(), dim=-1).to(dtype), normal(B, T, H, V)
    decay = -torch.rand((B, T, H), generator=generator).to(device) * 0.1
    channel = -torch.rand((B, T, H, D), generator=generator).to(device=device, dtype=dtype) * 0.1
    beta = torch.rand((B, T, H), generator=generator).to(device=device, dtype=dtype)
    gates = {
        "chunk_gated_delta_rule": {"g": decay, "beta": beta},
        "chunk_kda": {"g": channel, "beta": beta},
        "chunk_delta_rule": {"beta": beta},
        "chunk_gdn2": {"g": channel, "b": channel.sigmoid(), "w": v.sigmoid()},
        "chunk_gla": {"g": channel},
        "chunk_simple_gla": {"g": decay},
    }
    return {"q": q, "k": k, "v": v, **gates[name]}


FUNCTIONS = ("chunk_gated_delta_rule", "chunk_kda", "chunk_delta_rule", "chunk_gdn2", "chunk_gla", "chunk_simple_gla")


def _timed(run, device, torch):
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def _measure(name, arguments, rounds, device, torch):
    from fastweight.torch import ops

    contenders = {"fastweight": getattr(ops, name)}
    try:
        contenders["fla"] = getattr(importlib.import_module(f"fla.ops.{getattr(ops, name).module}"), name)
    except (ImportError, AttributeError):
        pass
    row = {"function": name}
    leaves = {key: x.detach().requires_grad_() for key, x in arguments.items()}
    calls = {}
    for who, function in contenders.items():
        def forward(function=function):
            with torch.no_grad():
                function(**arguments)

        def both(function=function):
            o = function(**leaves)[0]
            torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))

        calls[who] = {}
        for what, call in (("forward", forward), ("both", both)):
            try:
                for _ in range(2):  # the first call compiles and tunes theirs
                    call()
            except Exception as error:
                row[f"{who}_error"] = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            else:
                calls[who][what] = call
    times = {(who, what): [] for who in calls for what in calls[who]}
    for _ in range(rounds):
        for who, what in times:
            times[who, what].append(_timed(calls[who][what], device, torch))
    for (who, what), values in times.items():
        row[f"{who}_{what}_ms"] = statistics.median(values)
    return row


def _plot(rows, file):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axis = plt.subplots(figsize=(8, 4))
    series = [(f"{who}_{what}_ms", f"{who}, {what}") for who in ("fastweight", "fla") for what in ("forward", "both") if any(f"{who}_{what}_ms" in r for r in rows)]
    for i, (key, label) in enumerate(series):
        axis.bar([x + (i - len(series) / 2) * 0.8 / len(series) for x in range(len(rows))], [r.get(key, 0) for r in rows], 0.8 / len(series), label=label)
    axis.set_xticks(range(len(rows)), [r["function"].replace("chunk_", "") for r in rows])
    axis.set_ylabel("ms")
    axis.legend()
    plt.savefig(file, bbox_inches="tight")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m fastweight.bench", description=__doc__)
    parser.add_argument("--functions", nargs="+", default=FUNCTIONS, choices=FUNCTIONS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128, help="K")
    parser.add_argument("--value-dim", type=int, help="V, if not K")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--host", action="store_true", help="the time of a call on tensors of one token")
    parser.add_argument("--json")
    parser.add_argument("--plot")
    args = parser.parse_args(arguments)
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device == "cuda" else f"the CPU, {torch.get_num_threads()} threads"
    if args.host:
        from fastweight import host

        rows = host.main(device)
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump({"device": name, "torch": torch.__version__, "host_us": rows}, file, indent=1)
        return 0
    shape = (args.batch, args.tokens, args.heads, args.dim, args.value_dim or args.dim)
    print(f"{name}; torch {torch.__version__}; B {shape[0]}, T {shape[1]}, H {shape[2]}, K {shape[3]}, V {shape[4]}, {args.dtype}; medians of {args.rounds}, ms")
    print(f"{'function':24} {'forward':>9} {'fla':>9} {'ratio':>6} {'fwd+bwd':>9} {'fla':>9} {'ratio':>6}")
    rows = []
    for function in args.functions:
        row = _measure(function, _inputs(function, shape, getattr(torch, args.dtype), device, torch), args.rounds, device, torch)
        rows.append(row)
        line = f"{function:24}"
        for what in ("forward", "both"):
            ours, theirs = row.get(f"fastweight_{what}_ms"), row.get(f"fla_{what}_ms")
            line += f" {'-' if ours is None else format(ours, '.3f'):>9} {'-' if theirs is None else format(theirs, '.3f'):>9} {'-' if None in (ours, theirs) else format(theirs / ours, '.2f'):>6}"
        print(line)
        for who in ("fastweight", "fla"):
            if f"{who}_error" in row:
                print(f"    {who}: {row[f'{who}_error']}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"device": name, "torch": torch.__version__, "shape": shape, "dtype": args.dtype, "rows": rows}, file, indent=1)
    if args.plot:
        _plot(rows, args.plot)
    return 0 if all("fastweight_error" not in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
