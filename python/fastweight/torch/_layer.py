"""What a layer of a rule has (src/nn/mixer_params.cpp): its projections, parameters and their initial values; and the small functions of its gates."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F

from fastweight import rules
from fastweight._library import Error


@dataclasses.dataclass(frozen=True)
class Spec:
    """A layer's shape, as the engine's RecurrentMixerSpec. What follows from the fields is computed once: a compiled program reads plain values."""

    hidden: int
    heads: int
    v_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    output_gate: str
    output_gate_rank: int
    output_gate_bias: bool
    output_norm: str
    norm_eps: float
    decay_rank: int
    decay_per_value_head: bool
    decay_gate: str
    feature_map: str
    rope_theta: float
    precond_gates: str
    precond_center: str
    raw_read_correction: bool
    gain_source: str
    gain_factor: str
    single_gate: bool
    init: str
    rule: str
    tensors: frozenset  # names of what the rule takes
    decay: str
    gain_bound: float
    is_delta: bool
    tied_erase: bool
    scalar_erase: bool
    scalar_write: bool

    def __post_init__(self):
        def put(**values):
            for name, value in values.items():
                object.__setattr__(self, name, value)

        uses = self.uses
        put(key_size=self.heads * self.key_dim, value_size=self.v_heads * self.value_dim, decay_heads=self.v_heads if self.decay_per_value_head else self.heads)
        put(conv_channels=(2 if uses("k") else 1) * self.key_size + self.value_size)
        # A scalar erase gate beside the gain is the gain times a learned number a head (Comba).
        put(derives_erase_gate=uses("erase_gate") and self.scalar_erase and uses("beta") and not uses("erase_key"))
        put(projects_erase=uses("erase_gate") and not self.derives_erase_gate,
            uses_inner_decay=self.derives_erase_gate or uses("erase_key") and not uses("erase_write"),
            gain_doubles=self.is_delta and (self.tied_erase or self.derives_erase_gate) and uses("beta") and self.gain_bound > 1)
        # Whether the call takes the gain's logits: nothing else reads its values, and the call's bound is the layer's.
        values_read = self.gain_factor != "none" or self.single_gate or self.derives_erase_gate or self.precond_gates == "tied" and uses("precond_g")
        put(takes_beta_logits=not values_read and (self.gain_doubles or self.gain_bound <= 1))

    def uses(self, name):
        return name in self.tensors


@functools.lru_cache(maxsize=None)
def resolved(rule, allow_neg_eigval, precond_x):
    """The last fields of Spec, as the engine's ModelConfig::resolved_rule() has them."""
    info = rules.describe(rule)
    bound = 2.0 if allow_neg_eigval or info.numbers["gain_bound"] == 2.0 else 1.0
    text = info.text + (f" gain_bound={bound:g}" if bound != info.numbers["gain_bound"] else "")
    if precond_x != info.numbers["precond_x"]:
        text += f" precond_x={precond_x}"
    tensors = frozenset(t.name for t in rules.describe(text).inputs if t.required)
    axes = info.axes
    return (text.strip(), tensors, axes["decay"], bound, axes["update"] == "delta", axes["erase"] == "tied", axes["erase"] == "scalar", axes["write"] == "scalar")


_CHOICES = {
    "output_gate": ("silu", "sigmoid", "none"),
    "output_norm": ("head", "width"),
    "decay_gate": ("softplus", "logsigmoid", "bounded"),
    "feature_map": ("none", "elu", "relu", "silu", "product"),
    "precond_gates": ("own", "tied"),
    "precond_center": ("parameter", "exp"),
    "gain_source": ("projection", "learned"),
    "gain_factor": ("none", "1/t", "1/sqrt(t)", "1/log(t+1)"),
    "init": ("xavier", "normal", "torch"),
}


def validate(s, expand_v):
    for name, words in _CHOICES.items():
        if getattr(s, name) not in words:
            raise Error(f"{name}: expected one of {', '.join(words)}, got {getattr(s, name)!r}")
    for name, value in (("hidden_size", s.hidden), ("num_heads", s.heads), ("head_dim", s.key_dim)):
        if value < 1:
            raise Error(f"{name}: expected 1 or more, got {value}")
    if s.v_heads % s.heads:
        raise Error(f"num_v_heads: expected a multiple of num_heads = {s.heads}, got {s.v_heads}")
    if s.value_dim < 1 or abs(s.value_dim - expand_v * s.key_dim) > 1e-9:
        raise Error(f"expand_v: expected expand_v * head_dim to be whole and 1 or more, got {expand_v} * {s.key_dim}")
    if not 0 <= s.conv_size <= 256:
        raise Error(f"conv_size: expected 0 to 256, got {s.conv_size}")
    if s.rope_theta and s.key_dim % 2:
        raise Error(f"rope_theta: expected 0, since head_dim = {s.key_dim} is odd, got {s.rope_theta}")
    if s.raw_read_correction and s.uses("read_correction"):
        raise Error(f"raw_read_correction: expected False, because the rule ({s.rule}) corrects the read already, got True")
    if s.single_gate and not (s.decay == "scalar" and s.uses("beta") and s.gain_bound <= 1):
        raise Error("single_gate: expected a rule with decay=scalar, a gain gate and gain_bound=1, got " + repr(s.rule))
    if s.precond_gates == "tied" and s.uses("precond_g") and not (s.decay == "scalar" and s.uses("beta")):
        raise Error("precond_gates: expected own, since tied needs a rule with decay=scalar and a gain gate, got tied with " + repr(s.rule))
    if s.precond_center == "exp" and not s.uses("precond_center"):
        raise Error("precond_center: expected parameter, since exp needs a rule with a preconditioner that has a center, got exp with " + repr(s.rule))


def projections(s):
    """(name, [out, in] or [out, rank, in], whether it has a bias), in the engine's order."""
    d, keys, values = s.hidden, s.key_size, s.value_size
    yield "q_proj", (keys, d), False
    if s.uses("k"):
        yield "k_proj", (keys, d), False
    yield "v_proj", (values, d), False
    if s.decay == "channel" and s.uses("g"):
        channels = s.decay_heads * s.key_dim
        yield "f_proj", (channels, s.decay_rank, d) if s.decay_rank else (channels, d), s.decay_gate == "logsigmoid"
    if s.projects_erase:
        yield "b_proj", (s.v_heads if s.scalar_erase else keys, d), False
    if s.uses("erase_write"):
        yield "e_proj", (keys, d), False
    if s.uses("write_gate"):
        yield "w_proj", (s.v_heads if s.scalar_write else values, d), False
    if s.output_gate != "none":
        yield "g_proj", (values, s.output_gate_rank, d) if s.output_gate_rank else (values, d), s.output_gate_rank > 0 and s.output_gate_bias
    if s.uses("beta") and s.gain_source == "projection":
        yield "beta_proj" if s.projects_erase else "b_proj", (s.v_heads, d), False
    if s.decay == "scalar" and not s.single_gate:
        yield "a_proj", (s.v_heads, d), False
    if s.uses("lambda_"):
        yield "l_proj", (s.v_heads, d), False
    if s.uses("precond_g") and s.precond_gates == "own":
        yield "a_atk_proj", (s.heads, d), False
        yield "b_atk_proj", (s.heads, d), False


def vectors(s):
    """(name, shape) of the parameters that are numbers."""
    if s.decay == "scalar" and not s.single_gate:
        yield "A_log", s.v_heads
        yield "dt_bias", s.v_heads
    elif s.decay == "channel" and s.decay_gate == "softplus":
        yield "A_log", s.decay_heads
        yield "dt_bias", s.decay_heads * s.key_dim
    if s.uses("beta") and s.gain_source == "learned":
        yield "gain", 1
    if s.uses("lambda_"):
        yield "l_bias", 1
    if s.uses_inner_decay:
        yield "decay", s.heads
    if s.uses("read_correction") or s.raw_read_correction:
        yield "D", s.heads
    if s.uses("precond_g") and s.precond_gates == "own":
        yield "A_log_atk", s.heads
        yield "dt_bias_atk", s.heads
    if s.uses("precond_center"):
        yield "log_atk_scale", s.heads


def weights(s):
    """(module, shape of its weight) of convolutions and norms."""
    if s.conv_size > 0:
        yield "q_conv1d", (s.key_size, 1, s.conv_size)
        if s.uses("k"):
            yield "k_conv1d", (s.key_size, 1, s.conv_size)
        yield "v_conv1d", (s.value_size, 1, s.conv_size)
    if s.uses("erase_write"):
        yield "e_norm", (s.key_dim,)
    yield "o_norm", (s.value_size if s.output_norm == "width" else s.value_dim,)


def fla_names(s):
    """(name in flash-linear-attention's layer, name here) of modules that it calls otherwise."""
    if s.output_gate == "none":
        yield ("g_norm" if s.decay_gate == "bounded" else "norm"), "o_norm"
    else:
        yield "g_norm_swish_gate", "o_norm"
    if not s.uses("k"):
        yield "i_proj", "v_proj"
    if s.decay == "channel":
        yield "gk_proj", "f_proj"
        if s.uses("precond_g"):
            yield "a_proj", "a_atk_proj"


def initialise(s, name, p):
    """src/nn/init.cpp."""
    last = name.split(".")[-1]
    if name in ("A_log", "A_log_atk"):
        p.uniform_(1.0 if s.decay == "channel" else 0.0, 16.0).clamp_(min=1e-4).log_()
    elif name in ("dt_bias", "dt_bias_atk"):
        dt = p.uniform_(math.log(1e-3), math.log(0.1)).exp().clamp(min=1e-4)
        p.copy_(dt + torch.log(-torch.expm1(-dt)))
    elif name in ("l_bias", "decay", "D", "gain", "log_atk_scale"):
        p.fill_({"l_bias": -0.8, "decay": 1.0, "D": 0.02, "gain": 0.0, "log_atk_scale": -0.2}[name])
    elif name == "o_norm.weight":
        p.fill_(1.0)
    elif name == "e_norm.weight":
        p.fill_(s.key_dim**-0.5)
    elif last == "bias":
        p.zero_()
    elif "conv1d" in name:
        bound = s.conv_size**-0.5
        p.uniform_(-bound, bound)
    else:
        projection(s.init, p, p.shape[1])


def projection(init, p, inputs, outputs=None):
    """src/nn/init.cpp, projection_init(). inputs, outputs: columns and rows of p as the distribution counts them; None: its rows."""
    if init == "normal":
        p.normal_(0.0, 0.02)
    else:
        bound = inputs**-0.5 if init == "torch" else 2**-2.5 * math.sqrt(6 / ((outputs or p.shape[0]) + inputs))
        p.uniform_(-bound, bound)


def lengths(x, cu_seqlens):
    """int64 [N]: tokens of each sequence."""
    if cu_seqlens is None:
        return torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)
    return cu_seqlens.diff().to(device=x.device, dtype=torch.int64)


def places(x, begin, cu_seqlens):
    """int64 [B, T]: the place of every token in its sequence, from 0."""
    token = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is None:
        return (token + (0 if begin is None else begin[:, None])).expand(x.shape[:2])
    offsets = cu_seqlens.to(device=x.device, dtype=torch.int64)
    n = torch.bucketize(token, offsets[1:], right=True).clamp(max=offsets.shape[0] - 2)
    place = token - offsets[n]
    return (place if begin is None else place + begin[n])[None]


def turned(x, place, theta):
    """Rotary embedding of x [B, T, H, K]: the pair (c, c + K / 2) by place theta^(-2 c / K)."""
    half = x.shape[-1] // 2
    rate = theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = place.to(torch.float64)[..., None, None] * rate
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = angle.cos().to(exact), angle.sin().to(exact)
    a, b = x[..., :half].to(exact), x[..., half:].to(exact)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def factor(kind, t, dtype):
    t = t.to(dtype)
    return {"1/t": lambda: 1 / t, "1/sqrt(t)": lambda: t.rsqrt(), "1/log(t+1)": lambda: 1 / torch.log(t + 1)}[kind]()


def per_value_head(x, s):
    """[HV] from [H]."""
    return x.repeat_interleave(s.v_heads // s.heads)


def bounded_decay(x, bound):
    """log(b + (1 - b) sigmoid(x)), exact where the decay is near 1 and where it is near 0."""
    if bound is None:
        return F.logsigmoid(x)
    taken = (1 - bound) * torch.sigmoid(-x)
    near = taken < 0.5
    # Each branch sees only numbers that it can take, so that neither has an infinite slope.
    small = torch.log1p(-torch.where(near, taken, torch.zeros_like(taken)))
    kept = bound + (1 - bound) * torch.sigmoid(x)
    large = torch.where(bound > 0, torch.log(torch.where(near | (bound == 0), torch.ones_like(kept), kept)), F.logsigmoid(x))
    return torch.where(near, small, large)
