"""What the functions of this package share: the rule's text, gates given as logits, and the call itself."""

from __future__ import annotations

import functools
import os

import torch
import torch.nn.functional as F

import fastweight.torch
from fastweight.torch import _plans, forward, step
from fastweight.torch._serving import NotServed, accept, checking

_STEP_TOKENS = 8  # a fused_recurrent call without gradients of so many tokens or fewer is a decode step


_BOUND = float(os.environ.get("FASTWEIGHT_GAIN_BOUND", "1"))
# K at most on CUDA without a delta rule, or with step sizes of at most 1, without a preconditioner or an erase key of
# its own.
_WIDE = 256


def _wide(bound):
    return _WIDE if bound <= 1 else 128


def _text(axes, bound, l2norm):
    return f"{axes} gain_bound={bound}" + _norm(l2norm)


_kept_text = functools.lru_cache(maxsize=None)(_text)


def _rule(axes, bound, l2norm):
    """The rule's text, cached: formatting it is a visible part of a call. A compiled program has it as a constant."""
    return (_text if torch.compiler.is_compiling() else _kept_text)(axes, bound, l2norm)


def _no_more(kwargs):
    for name, value in kwargs.items():
        if value is not None and value is not False:
            raise NotServed(f"{name}: not served")


def _chunk_size(kwargs, sizes):
    """Pops the chunk size of FLA's kernels, which ours choose. A size that FLA refuses goes to FLA."""
    size = kwargs.pop("chunk_size", None)
    if size is not None and size not in sizes:
        raise NotServed(f"chunk_size: expected one of {sizes}, got {size}")


def _v_first(state_v_first, kwargs):
    """Pops the former name of state_v_first."""
    return bool(kwargs.pop("transpose_state_layout", False) or state_v_first)


@torch.compiler.assume_constant_result
def _logits_taken(device_type):
    """Whether the library takes logits on a device of this type, in the form that set_form() says."""
    return not (device_type == "cuda" and fastweight.torch._form == "decode") and _logits(device_type)


@functools.lru_cache(maxsize=None)
def _logits(device_type):
    config = _plans.Config("gated_deltanet", gates="g=softplus beta=sigmoid")
    try:
        _plans.sizes_of(_plans.descriptor(config, _plans.Shapes(1, 1, 1, 1, 1, 1), torch.float32, None, torch.device(device_type), None))
    except (ValueError, RuntimeError):
        return False
    return True


def _decay(g, A_log, dt_bias, lower_bound=None, as_value=False):
    """log-decay of raw gates: -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)). g [B, T, HV] or [B, T, HV, K].
    Returns logits for _run, a tuple (tensor, activation as in fw_gates, a_log, dt_bias), or the value as a tensor: with
    as_value, and where the library takes no logits on that device."""
    if A_log is None and lower_bound is None:
        raise NotServed("A_log: expected a tensor with use_gate_in_kernel, got None")
    if checking():
        return g
    heads = g.shape[2]
    if not as_value and _logits_taken(g.device.type):
        if dt_bias is not None:
            if g.dim() == 3:
                dt_bias = dt_bias.reshape(heads)
            else:
                dt_bias = dt_bias.reshape(heads, 1).expand(heads, g.shape[3]) if dt_bias.numel() == heads else dt_bias.reshape(heads, g.shape[3])
        how = "g=softplus" if lower_bound is None else f"g=lower_bound lower_bound={float(lower_bound)}"
        return g, how, None if A_log is None else A_log.reshape(heads), dt_bias
    wide = (heads,) + (1,) * (g.dim() - 3)
    x = g.float()
    if dt_bias is not None:
        x = x + dt_bias.float().view(wide if dt_bias.numel() == heads else (heads, g.shape[3]))
    rate = None if A_log is None else A_log.float().view(wide).exp()
    if lower_bound is None:
        return -rate * F.softplus(x)
    return lower_bound * torch.sigmoid(x if rate is None else rate * x)


def _gain(beta, use_sigmoid, allow_neg_eigval, bound=None):
    """beta or its logits as _decay gives them, and the bound that the rule is told."""
    if allow_neg_eigval and not use_sigmoid:
        raise ValueError("allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True beside it, got False")
    if not use_sigmoid or checking():
        return beta, bound or _BOUND
    bound = 2.0 if allow_neg_eigval else 1.0
    if _logits_taken(beta.device.type):
        return (beta, "beta=sigmoid", None, None), bound
    beta = beta.float().sigmoid()
    return (beta * 2 if allow_neg_eigval else beta), bound


def _norm(use_qk_l2norm_in_kernel):
    return " q_norm=l2 k_norm=l2" if use_qk_l2norm_in_kernel else ""


def _run(rule, q, k, v, *, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu=None, v_first=False, recurrent=False, **tensors):
    """(o, final_state, final_precond) of a chunk or a recurrent form."""
    if checking():
        accept()
    initial_precond = tensors.pop("initial_precond", None)
    gates = ""
    for name in ("g", "beta"):
        gate = tensors.get(name)
        if isinstance(gate, tuple):
            tensors[name], how, a_log, dt_bias = gate
            gates += " " + how
            if name == "g":
                tensors["a_log"], tensors["dt_bias"] = a_log, dt_bias
    precond = "precond_g" in tensors
    if recurrent and output_final_state and cu_seqlens is None and q.shape[1] <= _STEP_TOKENS and not (
        torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in (q, k, v, initial_state, *tensors.values())])
    ):
        shape = (q.shape[0], v.shape[2], *((v.shape[3], q.shape[3]) if v_first else (q.shape[3], v.shape[3])))
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        # The caller keeps its state (beams, prefixes): the step works on a copy.
        state = q.new_zeros(shape, dtype=dtype) if initial_state is None else initial_state.to(dtype, copy=True)
        state_p = None
        if precond:
            state_p = q.new_zeros((q.shape[0], q.shape[2], q.shape[3]), dtype=dtype) if initial_precond is None else initial_precond.to(dtype, copy=True)
        return step(rule, q, k, v, state, state_p, scale=scale, state_v_first=v_first, gates=gates, **tensors), state, state_p
    o, final_state, final_precond = forward(
        rule, q, k, v, initial_state=initial_state, initial_precond=initial_precond, output_final_state=output_final_state, scale=scale,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, state_v_first=v_first, gates=gates, **tensors)
    return o, final_state, final_precond  # a plain tuple: torch 2.6 compiles no slice of a named one
