"""The recurrence as a plain torch loop, one token at a time, written from the C header's definition of a rule: what the tests of
fastweight.torch compare values and gradients with. Differentiated by torch itself."""

import math

import torch

from fastweight import _library

_AXES = _library.header().field_enums


def axes(rule):
    """{axis: name of its value, or number}."""
    struct = _library.rule_struct(rule)
    out = {}
    for name, _ in struct._fields_:
        if name in ("size", "reserved"):
            continue
        enum = _AXES.get(("fw_rule", name))
        value = getattr(struct, name)
        out[name] = value if enum is None else next(k for k, v in _library.header().enums[enum].items() if v == value)
    return out


def shapes(rule, B, T, H, HV, K, V):
    """{input: shape} that the rule takes, in the order of the header, without states."""
    a = axes(rule)
    online = a["update"] == "delta"
    s = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V)}
    if a["key_source"] == "decay":
        del s["k"]
    if a["decay"] in ("scalar", "channel"):
        s["g"] = (B, T, HV) if a["decay"] == "scalar" else (B, T, HV if "k" in s else H, K)
    if ((online and a["erase"] == "tied") or a["write"] == "tied") and a["gain"] not in ("one", "nlms"):
        s["beta"] = (B, T, HV)
    if online and a["feedback"] == "learned":
        s["lambda_"] = (B, T, HV)
    if online and a["erase_key"] == "own":
        s["erase_key"] = (B, T, H, K)
    if online and a["erase_write"] == "own":
        s["erase_write"] = (B, T, H, K)
    if online and a["erase"] != "tied":
        s["erase_gate"] = (B, T, HV) if a["erase"] == "scalar" else (B, T, HV, K)
    if a["write"] != "tied":
        s["write_gate"] = (B, T, HV) if a["write"] == "scalar" else (B, T, HV, V)
    if a["read"] == "corrected":
        s["read_correction"] = (B, T, HV)
    if a["precond"] != "none":
        s["precond_g"] = (B, T, H)
        s["precond_beta"] = (B, T, H)
        if not a["precond_form"].startswith("inverse"):
            s["precond_center"] = (H,)
    return s


def random_inputs(rule, B=2, T=37, H=2, HV=4, K=12, V=20, dtype=torch.float64, seed=1, device="cpu"):
    """Inputs in the ranges that gates have."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes(rule, B, T, H, HV, K, V).items():
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name in ("g", "precond_g"):
            x = -0.1 * x.abs()
        elif name in ("beta", "lambda_", "erase_gate", "write_gate", "read_correction", "precond_beta"):
            x = x.sigmoid()
        elif name in ("q", "k", "erase_key", "erase_write"):
            x = x / math.sqrt(K)  # raw keys of about unit length keep the step bounded
        out[name] = x.to(device=device, dtype=torch.float32 if name == "precond_center" and dtype == torch.bfloat16 else dtype)
    return out


def _normalised(x, how, eps):
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt() if how == "l2" else x


def recurrence(rule, inputs, initial_state=None, initial_precond=None, scale=None):
    """o, final_state [B, HV, K, V], final_precond [B, H, K] or None."""
    a = axes(rule)
    online = a["update"] == "delta"
    q, v = inputs["q"], inputs["v"]
    k = inputs["k"] if "k" in inputs else -torch.expm1(inputs["g"])
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    group = HV // H
    q = _normalised(q, a["q_norm"], a["norm_eps"])
    k = _normalised(k, a["k_norm"], a["norm_eps"])
    p = _normalised(inputs["erase_key"], a["k_norm"], a["norm_eps"]) if "erase_key" in inputs else k
    A = initial_precond if initial_precond is not None else q.new_zeros(B, H, K)
    S = initial_state if initial_state is not None else q.new_zeros(B, HV, K, V)

    def wide(x):
        return x.repeat_interleave(group, 1)

    def gate(name, how, t, tied):
        if how == "tied":
            return tied[..., None]
        x = inputs[name][:, t]
        return x[..., None] if how == "scalar" else x.mean(-1, keepdim=True) if how == "averaged" else x

    outputs = []
    for t in range(T):
        qt, kt, pt = q[:, t], k[:, t], p[:, t]
        square = wide(kt.square().sum(-1))
        beta = inputs["beta"][:, t] if "beta" in inputs else torch.ones_like(square)
        M = torch.ones_like(kt)
        alpha_p, beta_p = torch.ones(B, H, dtype=q.dtype), torch.ones(B, H, dtype=q.dtype)
        if a["precond"] != "none":
            before = A
            alpha_p, beta_p = inputs["precond_g"][:, t].exp(), inputs["precond_beta"][:, t]
            A = alpha_p[..., None] * A + beta_p[..., None] * kt.square()
            form = a["precond_form"]
            if form.startswith("inverse"):
                M = 1 / ((before if form == "inverse_previous" else A) + a["precond_ridge"])
            else:
                y = (A + a["precond_eps"]).log() - inputs["precond_center"][None, :, None]
                s = y / (1 + y.abs())
                M = a["precond_x"] ** {"squash": -s, "squash_low": -(1 + s) / 2, "squash_high": (1 - s) / 2, "tanh": -y.tanh()}[form]
        c = (kt * M * kt).sum(-1)
        s = {
            "one": lambda: torch.ones_like(square),
            "gate": lambda: beta,
            "kaczmarz": lambda: beta / (square + a["gain_eps"]),
            "nlms": lambda: 1 / (square + a["gain_eps"]),
            "longhorn": lambda: beta / (1 + beta * square),
            "precond_longhorn": lambda: beta / (1 + beta * wide(c)),
            "efla": lambda: (1 - torch.exp(-beta * square)) / square,
        }[a["gain"]]()
        if a["normaliser"] != "none":
            M = M * {"key": lambda: 1 / c, "one_plus": lambda: 1 / (1 + c), "gated": lambda: beta_p / (alpha_p + beta_p * c)}[a["normaliser"]]()[..., None]
        write_key = kt * M if a["precond"] != "read" else kt
        read = wide(qt)
        if a["read"] == "corrected":
            read = read - inputs["read_correction"][:, t][..., None] * wide(kt)
        if a["precond"] == "read":
            read = wide(M) * read
        read = read * (K**-0.5 if scale is None else scale)
        before = S
        if a["decay"] == "constant":
            S = S * (1 - 2.0 ** (-5 - torch.arange(HV, dtype=q.dtype)))[None, :, None, None]
        elif a["decay"] != "none":
            g = inputs["g"][:, t].exp()
            S = S * (g[..., None, None] if a["decay"] == "scalar" else (g if g.shape[1] == HV else wide(g))[..., None])
        z = gate("write_gate", a["write"], t, s) * v[:, t]
        own = online and a["erase_write"] == "own"
        if online:
            e = wide(pt)
            if a["feedback"] != "none":
                e = e + (inputs["lambda_"][:, t][..., None] if a["feedback"] == "learned" else a["lambda"]) * wide(qt)
            e = gate("erase_gate", a["erase"], t, s) * e
            found = torch.einsum("bhkv,bhk->bhv", before if a["erase_state"] == "previous" else S, e)
            if own:
                S = S - torch.einsum("bhk,bhv->bhkv", wide(inputs["erase_write"][:, t]), found)
            else:
                z = z - found
        S = S + torch.einsum("bhk,bhv->bhkv", wide(write_key), z)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, read))
    return torch.stack(outputs, 1), S, A if a["precond"] != "none" else None
