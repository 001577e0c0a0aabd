#!/usr/bin/env python3
"""The published kernels of mamba2, mamba3 (state-spaces/mamba, Triton), gated_deltanet, kda, gla, hgrn2, dplr, rwkv7 and mesa (flash-linear-attention, Triton) on a GPU in one run, and
beside them, in turn, this project's of the same recurrence where a Python call has it (fastweight.torch); mamba3 and mesa of this project are
bench/cuda/mamba_bench's. One JSON line a case: milliseconds by events, medians of 20 after 5, forward without gradients, and forward with backward.
Nothing of theirs is kept here; PYTHONPATH names their checkouts, in which an empty mamba_ssm/__init__.py stands for the one that imports compiled kernels.

    state_space.py [--wait FOLDER] [--configs N] CASE...

Their kernels choose among many configurations by timing each, which takes minutes of compiling: with --configs N among the first N that they list, which may be
slower than their best. With --wait cases that are compiled and tuned side by side, one process each, are timed one after the other: FOLDER has a file for each that is ready, and a lock.
"""

import contextlib
import faulthandler
import fcntl
import json
import os
import sys
import time

import torch
from gpu_times import median_ms

GENERATOR = torch.Generator(device="cpu").manual_seed(0)


def keep_configs(count):
    """Of every tuner's configurations the first ones."""
    from triton.runtime import autotuner

    make = autotuner.Autotuner.__init__

    def fewer(self, *arguments, **named):
        make(self, *arguments, **named)
        self.configs = self.configs[:count]

    autotuner.Autotuner.__init__ = fewer


def normal(*size, dtype=torch.bfloat16):
    return torch.randn(size, generator=GENERATOR).to(device="cuda", dtype=dtype)


def uniform(*size, low=0.0, high=1.0, dtype=torch.bfloat16):
    return (low + (high - low) * torch.rand(size, generator=GENERATOR)).to(device="cuda", dtype=dtype)


def unit(x):
    return torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype)


def ours(rule, **options):
    from fastweight.torch import forward

    return lambda **tensors: forward(rule, **tensors, **options)[0]


def delta(B, T, H, K, name="gated_deltanet"):
    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, K)
    beta, channels = uniform(B, T, H), (K,) if name == "kda" else ()
    g = -uniform(B, T, H, *channels, low=0.001, high=0.1, dtype=torch.float32)
    if name == "kda":
        from fla.ops.kda import chunk_kda as theirs
    else:
        import fla.ops.common.chunk_o
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as theirs

        # With Triton 3.4 to 3.7.0 on Hopper their gated backward gives wrong numbers, and refuses; what is timed here is its speed.
        fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1 = True
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return (lambda **x: theirs(**x, use_qk_l2norm_in_kernel=True)[0], tensors), (ours(name), tensors)


def mamba2(B, T, H, N, P, G):
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x, b, c = normal(B, T, H, P), normal(B, T, G, N), normal(B, T, G, N)
    dt, a = uniform(B, T, H, low=0.001, high=0.1, dtype=torch.float32), -uniform(H, low=1, high=8, dtype=torch.float32)
    theirs = (lambda x, dt, a, b, c: mamba_chunk_scan_combined(x, dt, a, b, c, 256), {"x": x, "dt": dt, "a": a, "b": b, "c": c})
    here = (ours("mamba2 write=scalar", scale=1.0), {"q": c, "k": b, "v": x, "write_gate": dt, "g": dt * a})
    return theirs, here


def mamba3(B, T, H, N, P, G):
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

    q, k, v, z = normal(B, T, G, N), normal(B, T, G, N), normal(B, T, H, P), None
    adt, dt = -uniform(B, H, T, high=0.1, dtype=torch.float32), uniform(B, H, T, low=0.001, high=0.1, dtype=torch.float32)
    trap, angles = normal(B, H, T), normal(B, T, H, N // 4, dtype=torch.float32)
    bias = normal(H, N, dtype=torch.float32)
    tensors = {"q": q, "k": k, "v": v, "adt": adt, "dt": dt, "trap": trap, "q_bias": bias, "k_bias": bias.clone(), "angles": angles, "d": normal(H, dtype=torch.float32)}
    return (lambda q, k, v, adt, dt, trap, q_bias, k_bias, angles, d: mamba3_siso_combined(q, k, v, adt, dt, trap, q_bias, k_bias, angles, d, z), tensors), None


def gla(B, T, H, K, name="gla"):
    from fla.ops.gla import chunk_gla

    q, k, v, g = normal(B, T, H, K), unit(normal(B, T, H, K)), normal(B, T, H, K), -uniform(B, T, H, K, low=0.001, high=0.1)
    if name == "hgrn2":
        return (lambda q, v, g: chunk_gla(q, 1 - g.exp(), v, g)[0], {"q": q, "v": v, "g": g}), (lambda q, v, g: ours("hgrn2")(q=q, k=None, v=v, g=g), {"q": q, "v": v, "g": g})
    return (lambda q, k, v, g: chunk_gla(q, k, v, g)[0], {"q": q, "k": k, "v": v, "g": g}), (ours("gla"), {"q": q, "k": k, "v": v, "g": g})


def dplr(B, T, H, K):
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule

    # RWKV-7: a removal key, and along it a in [0, 1].
    q, k, v, g = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, K), -uniform(B, T, H, K, low=0.001, high=0.6)
    p, rate = unit(normal(B, T, H, K)), uniform(B, T, H, K)
    theirs = (lambda q, k, v, a, b, g: chunk_dplr_delta_rule(q, k, v, a, b, g, scale=1.0)[0], {"q": q, "k": k, "v": v, "a": -p, "b": p * rate, "g": g})
    here = (ours("dplr", scale=1.0), {"q": q, "k": k, "v": v, "g": g, "erase_key": p, "erase_write": p * rate})
    return theirs, here


def mesa(B, T, H, K):
    from fla.ops.mesa_net import chunk_mesa_net

    q, k, v = unit(normal(B, T, H, K)), unit(normal(B, T, H, K)), normal(B, T, H, K)
    g, beta = -uniform(B, T, H, high=0.1, dtype=torch.float32), uniform(B, T, H, dtype=torch.float32)
    lamb = uniform(H, K, low=0.3, high=1, dtype=torch.float32)
    return (lambda q, k, v, g, beta, lamb: chunk_mesa_net(q, k, v, g, beta, lamb)[0], {"q": q, "k": k, "v": v, "g": g, "beta": beta, "lamb": lamb}), None


CASES = {
    "gated_deltanet": (delta, {"B": 4, "T": 4096, "H": 16, "K": 128}),
    "kda": (lambda **shape: delta(**shape, name="kda"), {"B": 4, "T": 4096, "H": 16, "K": 128}),
    "mamba2": (mamba2, {"B": 4, "T": 4096, "H": 16, "N": 128, "P": 128, "G": 16}),
    "mamba2_groups": (mamba2, {"B": 8, "T": 2048, "H": 64, "N": 128, "P": 64, "G": 1}),
    "mamba3": (mamba3, {"B": 8, "T": 2048, "H": 64, "N": 128, "P": 64, "G": 1}),
    "gla": (gla, {"B": 4, "T": 4096, "H": 16, "K": 128}),
    "hgrn2": (lambda **shape: gla(**shape, name="hgrn2"), {"B": 4, "T": 4096, "H": 16, "K": 128}),
    "dplr": (dplr, {"B": 4, "T": 4096, "H": 16, "K": 128}),
    "rwkv7": (dplr, {"B": 8, "T": 2048, "H": 32, "K": 64}),
    "mesa": (mesa, {"B": 4, "T": 2048, "H": 16, "K": 128}),
}


def calls_of(function, tensors):
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    o = function(**leaves)
    d_o = torch.randn_like(o)
    del o

    def forward():
        with torch.no_grad():
            function(**tensors)

    return forward, lambda: torch.autograd.grad(function(**leaves), list(leaves.values()), d_o)


@contextlib.contextmanager
def in_turn(folder, name):
    """Every process of the folder is ready, and none else runs."""
    if folder is None:
        yield
        return
    open(os.path.join(folder, f"{name}.ready"), "w").close()
    until = time.time() + float(os.environ.get("WAIT_SECONDS", "120"))
    while len([f for f in os.listdir(folder) if f.endswith(".ready")]) < int(os.environ["WAIT_COUNT"]) and time.time() < until:
        time.sleep(0.5)
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def time_case(name, folder):
    make, shape = CASES[name]
    row = {"case": name, **shape, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    calls = {}
    try:
        pairs = dict(zip(("peer", "here"), make(**shape)))
    except Exception as error:
        pairs, row["error"] = {}, str(error)[:300]
    for who, pair in pairs.items():
        if pair is None:
            continue
        try:
            calls[who] = calls_of(*pair)
            for call in calls[who]:  # compiles and tunes
                call()
                call()
            torch.cuda.synchronize()
        except Exception as error:
            calls.pop(who, None)
            row[f"{who}_error"] = f"{type(error).__name__}: {error}"[:300]
    with in_turn(folder, name):
        for what, i in (("forward_ms", 0), ("both_ms", 1)):
            for who in calls:
                row[f"{who}_{what}"] = round(median_ms(calls[who][i]), 4)
            if what == "forward_ms":
                print(json.dumps(row), file=sys.stderr, flush=True)
    for what in ("forward_ms", "both_ms"):
        if f"peer_{what}" in row and f"here_{what}" in row:
            row[f"ratio_{what[:-3]}"] = round(row[f"peer_{what}"] / row[f"here_{what}"], 2)
    print(json.dumps(row), flush=True)


def main():
    arguments = sys.argv[1:]
    folder = None
    if arguments[:1] == ["--wait"]:
        folder, arguments = arguments[1], arguments[2:]
    if arguments[:1] == ["--configs"]:
        keep_configs(int(arguments[1]))
        arguments = arguments[2:]
    if "STATE_SPACE_SECONDS" in os.environ:  # where it stands when its time is over
        faulthandler.dump_traceback_later(int(os.environ["STATE_SPACE_SECONDS"]), exit=True)
    for name in arguments or CASES:
        time_case(name, folder)


if __name__ == "__main__":
    main()
