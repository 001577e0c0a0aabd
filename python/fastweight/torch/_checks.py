"""What check=True looks at before a call, which costs passes over its tensors; and which layout a refused call seems to have."""

import os

import torch

from fastweight._library import Error
from fastweight.torch import _plans

_ON = os.environ.get("FASTWEIGHT_CHECK", "0") != "0"
_SLACK = 1e-3  # of gates rounded to bfloat16
_TOKENS = ("beta", "lambda", "erase_gate", "write_gate")


def wanted(check):
    """Whether a call's values are checked: as it says, else as FASTWEIGHT_CHECK does. Never of a compiled program, which has no values yet."""
    return (_ON if check is None else check) and not torch.compiler.is_compiling()


def _shown(x):
    return f"{float(x):.6g}"


def _bounded(name, tensor, least, most, rule):
    low, high = tensor.detach().aminmax()
    if low < least - _SLACK or high > most + _SLACK:
        value = low if low < least - _SLACK else high
        hint = "; gain_bound=2 in the rule allows gains up to 2" if most == 1 and name in ("beta", "erase_gate") and high <= 2 + _SLACK and low >= -_SLACK else ""
        raise Error(f"{name}: expected values from {least:g} to {most:g}, as the rule ({rule}) has them, got {_shown(value)}{hint}")


def check_values(rule, inputs, gates):
    """inputs: {name of the C header: tensor or None}, checked for kind and device. Raises fastweight.Error that names the tensor."""
    struct = _plans._library.rule_struct(rule)
    logits = _plans._library.gates_struct(gates or "")
    text = _plans._library.rule_text(struct) or rule
    present = {name: t for name, t in inputs.items() if t is not None}
    types = {name: t.dtype for name, t in present.items() if name in ("q", "k", "v")}
    if len(set(types.values())) > 1:
        first, *others = types.items()
        name, dtype = next((n, d) for n, d in others if d != first[1])
        raise Error(f"{name}: expected {first[1]}, as {first[0]} has it, got {dtype}")
    for name, t in present.items():
        if t.numel() > 0 and not bool(torch.isfinite(t.detach()).all()):
            bad = t.detach()[~torch.isfinite(t.detach())][0]
            raise Error(f"{name}: expected finite numbers, got {_shown(bad)}")
    gains = ("kaczmarz", "longhorn", "efla", "precond_longhorn")
    kinds = _plans.HEADER.enums["fw_gain"]
    gain = next(word for word, number in kinds.items() if number == struct.gain)
    for name in ("g", "precond_g", *_TOKENS, "precond_beta"):
        t = present.get(name)
        if t is None or t.numel() == 0 or getattr(logits, name, 0):
            continue
        if name in ("g", "precond_g"):
            high = t.detach().max()
            if high > 0:
                raise Error(f"{name}: expected log-decays, at most 0, got {_shown(high)}; pass the logarithm of a decay, or a logit with gates='{name}=softplus'")
        elif name == "beta" and gain in gains:
            if t.detach().min() < 0:
                raise Error(f"beta: expected 0 or more with gain={gain}, got {_shown(t.detach().min())}")
        else:
            _bounded(name, t, 0.0, struct.gain_bound if name in ("beta", "erase_gate") else 1.0, text)


def layout_hint(inputs):
    """What to add to the message of a refused call whose tensors seem to be [B, H, T, ...]; "" where they do not. inputs: in the header's order."""
    named = dict(zip(_plans.INPUTS, inputs))
    rows = {name: named[name] for name in ("q", "k", "v") if named.get(name) is not None and named[name].dim() == 4}
    gates = {name: t for name, t in named.items() if t is not None and name not in _plans.STATES and name not in "qkv" and t.dim() >= 3}
    every = {**rows, **gates}
    found = []
    for tokens in {size for t in every.values() for size in t.shape[1:3]}:
        if all(tokens in t.shape[1:3] for t in every.values()):
            turned = [name for name, t in every.items() if t.shape[1] != tokens]
            if len(turned) == len(every):
                continue  # then they agree, and something else is wrong
            # q, k and v come in the other layout more often than gates do.
            found.append((sum(1 if name in rows else 4 for name in turned), turned))
    best, text = min(found)[1] if found else None, ""
    if not best:
        return ""
    for name in best:
        tail = "" if every[name].dim() == 3 else ", V" if name in ("v", "write_gate") else ", K"
        heads = "HV" if name == "v" else "H"
        text += f"; {name} looks like [B, {heads}, T{tail}]; expected [B, T, {heads}{tail}]: {name}.transpose(1, 2)"
    return text
