"""What vLLM and SGLang have in common: the rule, gates as logits, q, k and v packed in one row."""

import os

import torch.nn.functional as F

from fastweight.torch._serving import NotServed
from fastweight.torch.ops import _common

RULE = "decay=scalar gain=gate q_norm=l2 k_norm=l2"
RULE_NORMED = "decay=scalar gain=gate"


def gates_of(a, b, A_log, dt_bias):
    """Arguments of forward and step for g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b); a, b: [..., HV].

    torch applies the activations where a device takes no logits."""
    if _common._logits_taken(a.device.type):
        return {"g": a, "beta": b, "a_log": A_log, "dt_bias": dt_bias, "gates": "g=softplus beta=sigmoid"}
    return {"g": -A_log.float().exp() * F.softplus(a.float() + dt_bias.float()), "beta": b.float().sigmoid()}


def split_row(mixed_qkv, value_heads, value_dim, key_dim):
    """q, k [N, 1, H, K], v [N, 1, HV, V] of rows [N, 2 H K + HV V], without a copy."""
    keys = mixed_qkv.shape[-1] - value_heads * value_dim
    if mixed_qkv.dim() != 2 or keys <= 0 or keys % (2 * key_dim) != 0:
        raise ValueError(f"mixed_qkv: expected [N, 2 H {key_dim} + {value_heads} {value_dim}], got shape {list(mixed_qkv.shape)}")
    q, k, v = mixed_qkv.split([keys // 2, keys // 2, value_heads * value_dim], dim=-1)
    return q.unflatten(-1, (1, -1, key_dim)), k.unflatten(-1, (1, -1, key_dim)), v.unflatten(-1, (1, value_heads, value_dim))


def refuse(kwargs, *known):
    """Raises NotServed for arguments that need other kernels; None and False need none."""
    for name, value in kwargs.items():
        if name not in known and value is not None and value is not False:
            raise NotServed(f"{name}: not served, got {value if isinstance(value, (bool, int, float, str)) else type(value).__name__}")


def asked(variable):
    return os.environ.get(variable, "0") not in ("", "0")


def one_token_each(tokens, sequences):
    if tokens != sequences:
        raise NotServed(f"q: expected one token a sequence, got {tokens} tokens of {sequences} sequences")

