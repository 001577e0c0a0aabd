#!/usr/bin/env python3
"""tests/conformance/: values that `fastweight verify` compares with, computed by an implementation that has nothing in common with the
sources but docs/recurrence.md: plain Python numbers, one token at a time, gradients by automatic differentiation of every single
operation. docs/conformance.md describes the files. Needs Python's standard library alone.

    tools/make_conformance.py [FOLDER]     writes FOLDER (tests/conformance)
    tools/make_conformance.py --check      computes all again and exits 1 if a value of tests/conformance differs by more than 1e-12"""

import json
import math
import pathlib
import random
import struct
import sys

HERE = pathlib.Path(__file__).resolve().parent.parent / "tests/conformance"

# ---- numbers that remember where they came from

TAPE = []


class Number:
    """A value, its gradient, and the numbers that it was made of with the slope towards each."""

    __slots__ = ("x", "d", "of", "slopes")

    def __init__(self, x, of=(), slopes=()):
        self.x, self.d, self.of, self.slopes = x, 0.0, of, slopes
        TAPE.append(self)

    def __add__(self, o):
        return Number(self.x + o.x, (self, o), (1.0, 1.0)) if isinstance(o, Number) else Number(self.x + o, (self,), (1.0,))

    def __sub__(self, o):
        return Number(self.x - o.x, (self, o), (1.0, -1.0)) if isinstance(o, Number) else Number(self.x - o, (self,), (1.0,))

    def __mul__(self, o):
        return Number(self.x * o.x, (self, o), (o.x, self.x)) if isinstance(o, Number) else Number(self.x * o, (self,), (o,))

    def __truediv__(self, o):
        if isinstance(o, Number):
            return Number(self.x / o.x, (self, o), (1 / o.x, -self.x / (o.x * o.x)))
        return Number(self.x / o, (self,), (1 / o,))

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, o):
        return Number(o - self.x, (self,), (-1.0,))

    def __rtruediv__(self, o):
        return Number(o / self.x, (self,), (-o / (self.x * self.x),))

    def map(self, value, slope):
        return Number(value, (self,), (slope,))


def exp(a):
    y = math.exp(a.x)
    return a.map(y, y)


def log(a):
    return a.map(math.log(a.x), 1 / a.x)


def sqrt(a):
    y = math.sqrt(a.x)
    return a.map(y, 0.5 / y)


def absolute(a):
    return a.map(abs(a.x), 1.0 if a.x >= 0 else -1.0)


def sigmoid(a):
    y = 1 / (1 + math.exp(-a.x)) if a.x >= 0 else math.exp(a.x) / (1 + math.exp(a.x))
    return a.map(y, y * (1 - y))


def silu(a):
    return a * sigmoid(a)


def softplus(a):
    s = 1 / (1 + math.exp(-a.x)) if a.x >= 0 else math.exp(a.x) / (1 + math.exp(a.x))
    return a.map(max(a.x, 0.0) + math.log1p(math.exp(-abs(a.x))), s)


def dot(a, b):
    return Number(sum(p.x * q.x for p, q in zip(a, b)), (*a, *b), [q.x for q in b] + [p.x for p in a])


def matvec(rows, x):
    return [dot(row, x) for row in rows]


def backward(seeds):
    """Gradients of sum(seed * number) over pairs (number, seed); empties the tape."""
    for number, seed in seeds:
        number.d += seed
    for number in reversed(TAPE):
        d = number.d
        if d != 0.0:
            for parent, slope in zip(number.of, number.slopes):
                parent.d += d * slope
    TAPE.clear()


# ---- the recurrence, docs/recurrence.md 1 to 3


def token(state, r, w, e, z, alpha, before=False):
    """One token of a value head: the new state [K][V] and o [V]. e None: nothing is erased; alpha a number, a list, or None. before: the erase
    looks at the state before its decay."""
    keys, values = range(len(w)), range(len(z))
    if before:
        z = [z[j] - dot(e, [state[i][j] for i in keys]) for j in values]
        e = None
    if alpha is not None:
        state = [[(alpha[i] if isinstance(alpha, list) else alpha) * state[i][j] for j in values] for i in keys]
    u = z
    if e is not None:
        u = [z[j] - dot(e, [state[i][j] for i in keys]) for j in values]
    state = [[state[i][j] + w[i] * u[j] for j in values] for i in keys]
    return state, [dot(r, [state[i][j] for i in keys]) for j in values]


def precondition(a, k, g, beta, center, x=1.5, eps=1e-6):
    """A of this token and M."""
    decay = exp(g)
    a = [decay * a[i] + beta * (k[i] * k[i]) for i in range(len(k))]
    m = []
    for value in a:
        y = log(value + eps) - center
        m.append(exp((y / (1.0 + absolute(y))) * -math.log(x)))
    return a, m


def scaled(factor, vector):
    return [factor * v for v in vector]


def times(a, b):
    return [x * y for x, y in zip(a, b)]


def l2(v, eps=1e-6):
    norm = sqrt(dot(v, v) + eps)
    return [x / norm for x in v]


# ---- random numbers, all of them float32


def single(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def fill(shape, draw):
    return [fill(shape[1:], draw) for _ in range(shape[0])] if shape else single(draw())


def numbers(values):
    return [numbers(v) for v in values] if isinstance(values, list) else Number(values)


def flat(values):
    if not isinstance(values, list):
        return [values]
    return [x for v in values for x in flat(v)]


def value_of(values):
    return [value_of(v) for v in values] if isinstance(values, list) else values.x


def gradient_of(values):
    return [gradient_of(v) for v in values] if isinstance(values, list) else values.d


def shape_of(values):
    return [len(values), *shape_of(values[0])] if isinstance(values, list) else []


# ---- files of recurrences

# Name: decay, the kind of gain, inputs besides q, k and v (their letters are those of docs/conformance.md).
RULES = {
    "linear_attn": (None, "none", ()),
    "mamba2": ("scalar", "none", ("g",)),
    "gla": ("channel", "none", ("g",)),
    "gdn": ("scalar", "gate", ("g", "beta")),
    "gdn_raw_keys": ("scalar", "gate", ("g", "beta")),
    "kda": ("channel", "gate", ("g", "beta")),
    "gdn2": ("channel", "channel", ("g", "b", "w")),
    "gdn2_neg": ("channel", "channel", ("g", "b", "w")),
    "pgdn": ("scalar", "gate", ("g", "beta", "g_atk", "beta_atk", "log_atk_scale")),
    "pkda": ("channel", "gate", ("g", "beta", "g_atk", "beta_atk", "log_atk_scale")),
    "comba": ("scalar", "gate", ("g", "beta", "p")),
    "comba_previous": ("scalar", "gate", ("g", "beta", "p")),
    "qdelta": ("scalar", "gate", ("g", "beta", "lam")),
}
# B, T, H, HV, K, V, and whether it begins with a state. `chunk` is longer than a chunk of 64 tokens.
CASES = {"short": (2, 5, 2, 2, 8, 6, False), "grouped": (1, 19, 1, 2, 5, 7, True), "chunk": (1, 70, 1, 1, 8, 8, False)}


def unit(v):
    norm = math.sqrt(sum(x * x for x in v))
    return [single(x / norm) for x in v]


def draw_inputs(rule, case, rng):
    decay, _, names = RULES[rule]
    B, T, H, HV, K, V, begins = CASES[case]
    gauss, gate = lambda: rng.gauss(0, 1), lambda: rng.uniform(0.05, 0.95)
    forget = lambda: -rng.choice((0.0, 1.0, 1.0, 1.0)) * rng.expovariate(3.0)
    q, k, p = (fill([B, T, H, K], gauss) for _ in range(3))
    if rule != "gdn_raw_keys":
        q, k, p = ([[[unit(h) for h in t] for t in b] for b in x] for x in (q, k, p))
    else:
        k = fill([B, T, H, K], lambda: rng.gauss(0, 0.6))
    bound = 2.0 if rule == "gdn2_neg" else 1.0
    every = {
        "q": q,
        "k": k,
        "v": fill([B, T, HV, V], gauss),
        "g": fill([B, T, H, K] if decay == "channel" else [B, T, HV], forget),
        "beta": fill([B, T, HV], gate),
        "b": fill([B, T, H, K], lambda: bound * gate()),
        "w": fill([B, T, HV, V], gate),
        "p": p,
        "lam": fill([B, T, HV], gate),
        "g_atk": fill([B, T, H], lambda: -rng.expovariate(3.0)),
        "beta_atk": fill([B, T, H], gate),
        "log_atk_scale": fill([H], lambda: rng.gauss(-0.2, 0.3)),
    }
    inputs = {name: every[name] for name in ("q", "k", "v", *names)}
    if begins:
        inputs["S0"] = fill([B, HV, K, V], gauss)
        if "g_atk" in names:
            inputs["A0"] = fill([B, H, K], lambda: rng.uniform(0.0, 1.0))
    return inputs


def run_rule(rule, case, x):
    """o, S and (with a preconditioner) A from the inputs as Numbers."""
    decay, gain, names = RULES[rule]
    B, T, H, HV, K, V, _ = CASES[case]
    zero = lambda shape: numbers(fill(shape, lambda: 0.0))
    S, A = x.get("S0") or zero([B, HV, K, V]), x.get("A0") or zero([B, H, K])
    S, A = [list(b) for b in S], [list(b) for b in A]
    o = [[[None] * HV for _ in range(T)] for _ in range(B)]
    for b in range(B):
        for t in range(T):
            M = [None] * H
            if "g_atk" in names:
                for h in range(H):
                    A[b][h], M[h] = precondition(A[b][h], x["k"][b][t][h], x["g_atk"][b][t][h], x["beta_atk"][b][t][h], x["log_atk_scale"][h])
            for j in range(HV):
                h = j // (HV // H)
                q, k, v = x["q"][b][t][h], x["k"][b][t][h], x["v"][b][t][j]
                alpha = None
                if decay == "scalar":
                    alpha = exp(x["g"][b][t][j])
                elif decay == "channel":
                    alpha = [exp(g) for g in x["g"][b][t][h]]
                e, z = None, v
                if gain == "gate":
                    erase = x["p"][b][t][h] if "p" in names else k
                    if "lam" in names:
                        erase = [a + c for a, c in zip(erase, scaled(x["lam"][b][t][j], q))]
                    e, z = scaled(x["beta"][b][t][j], erase), scaled(x["beta"][b][t][j], v)
                elif gain == "channel":
                    e, z = times(x["b"][b][t][h], k), times(x["w"][b][t][j], v)
                w = k if M[h] is None else times(M[h], k)
                S[b][j], o[b][t][j] = token(S[b][j], scaled(K**-0.5, q), w, e, z, alpha, rule == "comba_previous")
    return {"o": o, "S": S, **({"A": A} if "g_atk" in names else {})}


def ops_file():
    tensors = {}
    for rule in RULES:
        for case in CASES:
            rng = random.Random(f"{rule}/{case}")
            x = numbers_of(draw_inputs(rule, case, rng))
            out = run_rule(rule, case, x)
            d = {"o": fill(shape_of(out["o"]), lambda: rng.gauss(0, 1)), "S": fill(shape_of(out["S"]), lambda: rng.gauss(0, 1))}
            backward(list(zip(flat(out["o"]), flat(d["o"]))) + list(zip(flat(out["S"]), flat(d["S"]))))
            add = lambda name, values, kind: tensors.__setitem__(f"{rule}/{case}/{name}", (kind, shape_of(values), flat(values)))
            for name, values in x.items():
                add(name, value_of(values), "F32")
                add(f"d_{name}", gradient_of(values), "F64")
            for name, values in out.items():
                add(name, value_of(values), "F64")
            add("do", d["o"], "F32")
            add("dS", d["S"], "F32")
    return tensors


def numbers_of(values):
    return {name: numbers(v) for name, v in values.items()}


# ---- models, docs/recurrence.md 7

HIDDEN, LAYERS, HEADS, KEY, VOCABULARY, MLP, CONV, EPS = 16, 2, 2, 8, 29, 24, 4, 1e-5
MODELS = {
    "gated_deltanet2_neg": {"decay": "channel", "gain": "channels", "bound": 2.0},
    "kaczmarz": {"decay": "scalar", "gain": "kaczmarz"},
    "qdelta": {"decay": "scalar", "gain": "gate", "feedback": True},
    "precond_gated_deltanet": {"decay": "scalar", "gain": "gate", "precond": True},
    "comba": {"decay": "scalar", "gain": "gate", "comba": True},
}
PROMPT, GREEDY, STEPS = 40, 8, 3


def draw_model(rule, rng):
    """Parameters by name: none at a value where a mistake would not show."""
    matrix = lambda n, m: fill([n, m], lambda: rng.gauss(0, m**-0.5))
    vector = lambda n, mean, deviation: fill([n], lambda: rng.gauss(mean, deviation))
    p = {"model.embeddings.weight": fill([VOCABULARY, HIDDEN], lambda: rng.gauss(0, 0.35)), "model.norm.weight": vector(HIDDEN, 1.0, 0.2)}
    size = HEADS * KEY
    for layer in range(LAYERS):
        mixer, block = f"model.layers.{layer}.attn.", f"model.layers.{layer}."
        for name in ("q", "k", "v", "g"):
            p[f"{mixer}{name}_proj.weight"] = matrix(size, HIDDEN)
        for name in ("q", "k", "v"):
            p[f"{mixer}{name}_conv1d.weight"] = fill([size, 1, CONV], lambda: rng.gauss(0, 0.5))
        p[f"{mixer}o_proj.weight"] = matrix(HIDDEN, size)
        p[f"{mixer}o_norm.weight"] = vector(KEY, 1.0, 0.2)
        channel = rule["decay"] == "channel"
        p[f"{mixer}{'f' if channel else 'a'}_proj.weight"] = matrix(size if channel else HEADS, HIDDEN)
        p[f"{mixer}A_log"] = vector(HEADS, 0.0, 0.5)
        p[f"{mixer}dt_bias"] = vector(size if channel else HEADS, -2.0, 0.5)
        p[f"{mixer}b_proj.weight"] = matrix(size if rule["gain"] == "channels" else HEADS, HIDDEN)
        if rule["gain"] == "channels":
            p[f"{mixer}w_proj.weight"] = matrix(size, HIDDEN)
        if "feedback" in rule:
            p[f"{mixer}l_proj.weight"], p[f"{mixer}l_bias"] = matrix(HEADS, HIDDEN), vector(1, -0.8, 0.1)
        if "comba" in rule:
            p[f"{mixer}decay"], p[f"{mixer}D"] = vector(HEADS, 1.0, 0.3), vector(HEADS, 0.3, 0.1)
        if "precond" in rule:
            p[f"{mixer}a_atk_proj.weight"], p[f"{mixer}b_atk_proj.weight"] = matrix(HEADS, HIDDEN), matrix(HEADS, HIDDEN)
            p[f"{mixer}A_log_atk"], p[f"{mixer}dt_bias_atk"] = vector(HEADS, 0.0, 0.5), vector(HEADS, -2.0, 0.5)
            p[f"{mixer}log_atk_scale"] = vector(HEADS, -0.2, 0.2)
        for name in ("attn_norm", "mlp_norm"):
            p[f"{block}{name}.weight"] = vector(HIDDEN, 1.0, 0.2)
        p[f"{block}mlp.gate_proj.weight"], p[f"{block}mlp.up_proj.weight"] = matrix(MLP, HIDDEN), matrix(MLP, HIDDEN)
        p[f"{block}mlp.down_proj.weight"] = matrix(HIDDEN, MLP)
    return p


def rms_norm(x, weight):
    root = sqrt(dot(x, x) / len(x) + EPS)
    return [(a / root) * w for a, w in zip(x, weight)]


def convolve(rows, weight):
    out = []
    for t in range(len(rows)):
        span = range(min(CONV, t + 1))
        out.append([silu(dot([weight[c][0][CONV - 1 - j] for j in span], [rows[t - j][c] for j in span])) for c in range(len(weight))])
    return out


def heads_of(row):
    return [row[h * KEY : (h + 1) * KEY] for h in range(HEADS)]


def log_decay(raw, a, delta):
    return exp(a) * softplus(raw + delta) * -1.0


def mixer(rule, p, prefix, rows):
    w = lambda name: p[prefix + name]
    project = lambda name: [matvec(w(f"{name}_proj.weight"), x) for x in rows]
    q, k, v = (convolve(project(name), w(f"{name}_conv1d.weight")) for name in ("q", "k", "v"))
    gate, erase = project("g"), project("b")
    decay = project("f" if rule["decay"] == "channel" else "a")
    write = project("w") if rule["gain"] == "channels" else None
    feedback = project("l") if "feedback" in rule else None
    atk = (project("a_atk"), project("b_atk")) if "precond" in rule else None
    S = [numbers(fill([KEY, KEY], lambda: 0.0)) for _ in range(HEADS)]
    A = [numbers(fill([KEY], lambda: 0.0)) for _ in range(HEADS)]
    out = []
    for t in range(len(rows)):
        y = []
        for h in range(HEADS):
            part = slice(h * KEY, (h + 1) * KEY)
            qh, kh, vh = l2(q[t][part]), k[t][part], v[t][part]
            if rule["gain"] != "kaczmarz":
                kh = l2(kh)
            if rule["decay"] == "channel":
                alpha = [exp(log_decay(decay[t][c], w("A_log")[h], w("dt_bias")[c])) for c in range(h * KEY, (h + 1) * KEY)]
            else:
                alpha = exp(log_decay(decay[t][h], w("A_log")[h], w("dt_bias")[h]))
            r, key = qh, kh
            if rule["gain"] == "channels":
                e = times([sigmoid(b) * rule["bound"] for b in erase[t][part]], kh)
                z = times([sigmoid(c) for c in write[t][part]], vh)
            else:
                s = sigmoid(erase[t][h])
                if rule["gain"] == "kaczmarz":
                    s = s / (dot(kh, kh) + 1e-6)
                looked_up, s_erase = kh, s
                if feedback is not None:
                    looked_up = [a + b for a, b in zip(kh, scaled(sigmoid(feedback[t][h] + w("l_bias")[0]), qh))]
                if "comba" in rule:
                    s_erase = s * sigmoid(w("decay")[h])
                    r = [a - b for a, b in zip(qh, scaled(w("D")[h], kh))]
                e, z = scaled(s_erase, looked_up), scaled(s, vh)
            if atk is not None:
                g = log_decay(atk[0][t][h], w("A_log_atk")[h], w("dt_bias_atk")[h])
                A[h], m = precondition(A[h], kh, g, sigmoid(atk[1][t][h]), w("log_atk_scale")[h])
                key = times(m, kh)
            S[h], o = token(S[h], scaled(KEY**-0.5, r), key, e, z, alpha, "comba" in rule)
            y += [a * silu(b) for a, b in zip(rms_norm(o, w("o_norm.weight")), gate[t][part])]
        out.append(matvec(w("o_proj.weight"), y))
    return out


def logits_of(rule, p, ids):
    x = [p["model.embeddings.weight"][i] for i in ids]
    add = lambda a, b: [[m + n for m, n in zip(r, s)] for r, s in zip(a, b)]
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        x = add(x, mixer(rule, p, block + "attn.", [rms_norm(row, p[block + "attn_norm.weight"]) for row in x]))
        normed = [rms_norm(row, p[block + "mlp_norm.weight"]) for row in x]
        hidden = [times([silu(a) for a in matvec(p[block + "mlp.gate_proj.weight"], row)], matvec(p[block + "mlp.up_proj.weight"], row)) for row in normed]
        x = add(x, [matvec(p[block + "mlp.down_proj.weight"], row) for row in hidden])
    return [matvec(p["model.embeddings.weight"], rms_norm(row, p["model.norm.weight"])) for row in x]


def cross_entropy(row, target):
    """-log softmax; the largest logit is taken out first."""
    top = max(a.x for a in row)
    powers = [math.exp(a.x - top) for a in row]
    total = sum(powers)
    slopes = [power / total for power in powers]
    slopes[target] -= 1.0
    return Number(math.log(total) + top - row[target].x, tuple(row), slopes)


def loss_of(rule, p, rows):
    """The mean over all but the last position of every row, and all logits."""
    logits, terms = [], []
    for ids in rows:
        out = logits_of(rule, p, ids)
        logits.append(value_of(out))
        terms += [cross_entropy(out[t], ids[t + 1]) for t in range(len(ids) - 1)]
    return dot(terms, numbers([1.0 / len(terms)] * len(terms))), logits


def greedy(rule, values, ids):
    ids, least = list(ids), math.inf
    for _ in range(GREEDY):
        last = value_of(logits_of(rule, numbers_of(values), ids)[-1])
        TAPE.clear()
        best, second = sorted(last, reverse=True)[:2]
        least = min(least, best - second)
        ids.append(last.index(best))
    if least < 1e-3:
        raise SystemExit(f"greedy: the two best logits are only {least} apart: take another seed")
    return ids[-GREEDY:]


def map_values(f, *trees):
    return [map_values(f, *parts) for parts in zip(*trees)] if isinstance(trees[0], list) else f(*trees)


def train(rule, values, batches, rates):
    """Losses before each step and norms before clipping: AdamW, betas 0.9 and 0.95, eps 1e-8, decay 0.1 on what has two or more dimensions."""
    zero = {name: map_values(lambda _: 0.0, v) for name, v in values.items()}
    m, s, losses, norms = dict(zero), dict(zero), [], []
    for step, (rows, rate) in enumerate(zip(batches, rates), 1):
        p = numbers_of(values)
        loss, _ = loss_of(rule, p, rows)
        losses.append(loss.x)
        backward([(loss, 1.0)])
        norm = math.sqrt(sum(g * g for v in p.values() for g in flat(gradient_of(v))))
        norms.append(norm)
        clip = min(1.0, 1.0 / (norm + 1e-6))
        for name, v in p.items():
            decay = 0.1 if len(shape_of(value_of(v))) >= 2 else 0.0
            g = map_values(lambda d: clip * d, gradient_of(v))
            m[name] = map_values(lambda a, d: 0.9 * a + (1 - 0.9) * d, m[name], g)
            s[name] = map_values(lambda a, d: 0.95 * a + (1 - 0.95) * d * d, s[name], g)

            def move(x, a, b):
                return x - rate * (a / (1 - 0.9**step) / (math.sqrt(b / (1 - 0.95**step)) + 1e-8) + decay * x)

            values = {**values, name: map_values(move, values[name], m[name], s[name])}
    return losses, norms


def model_files(name):
    """config.json as text, and the tensors of model.safetensors and io.safetensors."""
    rule, rng = MODELS[name], random.Random(f"model/{name}")
    values = draw_model(rule, rng)
    ids = [[rng.randrange(VOCABULARY) for _ in range(PROMPT + 4)] for _ in range(2)]
    batches = [[[rng.randrange(VOCABULARY) for _ in range(12)] for _ in range(2)] for _ in range(STEPS)]
    rates = [1e-3, 2e-3, 1e-3]
    p = numbers_of(values)
    loss, logits = loss_of(rule, p, ids)
    backward([(loss, 1.0)])
    losses, norms = train(rule, values, batches, rates)
    f64 = lambda v: ("F64", shape_of(v), flat(v))
    i64 = lambda v: ("I64", shape_of(v), flat(v))
    io = {"input_ids": i64(ids), "logits": f64(logits), "loss": f64([loss.x]), "greedy": i64([greedy(rule, values, ids[0][:PROMPT])])}
    io |= {f"grad/{n}": f64(gradient_of(v)) for n, v in p.items()}
    io |= {"trace/input_ids": i64(batches), "trace/lr": f64(rates), "trace/loss": f64(losses), "trace/norm": f64(norms)}
    config = {
        "model_type": "fastweight",
        "rule": name,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_heads": HEADS,
        "head_dim": KEY,
        "intermediate_size": MLP,
        "conv_size": CONV,
        "norm_eps": EPS,
        "tie_word_embeddings": True,
        "allow_neg_eigval": "bound" in rule,
    }
    return json.dumps(config, indent=2) + "\n", {n: ("F32", shape_of(v), flat(v)) for n, v in values.items()}, io


# ---- safetensors

CODES = {"F32": ("f", 4), "F64": ("d", 8), "I64": ("q", 8)}


def write(path, tensors):
    path.parent.mkdir(parents=True, exist_ok=True)
    header, body = {}, b""
    for name, (kind, shape, values) in sorted(tensors.items(), key=lambda item: (-CODES[item[1][0]][1], item[0])):
        data = struct.pack(f"<{len(values)}{CODES[kind][0]}", *values)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def differences(path, tensors):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    if set(header) != set(tensors):
        yield f"{path}: other tensors than now"
        return
    for name, (kind, shape, values) in tensors.items():
        begin, end = (8 + size + offset for offset in header[name]["data_offsets"])
        if (header[name]["dtype"], header[name]["shape"]) != (kind, shape):
            yield f"{path}: {name} has another shape or type than now"
            continue
        stored = struct.unpack(f"<{len(values)}{CODES[kind][0]}", data[begin:end])
        scale = max(map(abs, stored), default=0) or 1
        worst = max((abs(a - b) for a, b in zip(stored, values)), default=0)
        if worst > 1e-12 * scale:
            yield f"{path}: {name} differs by {worst / scale:.1e} of its largest value"


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    folder = HERE if check or len(sys.argv) < 2 else pathlib.Path(sys.argv[1])
    files = {"ops.safetensors": ops_file()}
    for name in MODELS:
        config, weights, io = model_files(name)
        files[f"models/{name}/model.safetensors"], files[f"models/{name}/io.safetensors"] = weights, io
        path = folder / "models" / name / "config.json"
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(config, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != config:
            print(f"{path}: another configuration than now")
            return 1
    found = []
    for name, tensors in files.items():
        if check:
            found += differences(folder / name, tensors)
        else:
            write(folder / name, tensors)
    for line in found:
        print(line)
    print(f"conformance: {sum(len(t) for t in files.values())} tensors {'recomputed' if check else 'written'}, {len(found)} differ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
