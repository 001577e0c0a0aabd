"""The recurrences under the names and signatures of flash-linear-attention (FLA).

    from fastweight.torch.ops import chunk_gated_delta_rule      # instead of: from fla.ops.gated_delta_rule import ...

q, k are [B, T, H, K], v is [B, T, HV, V]. The functions return (o, final_state), the precond_* forms also the
preconditioner's state; final states are None unless output_final_state. A call that these kernels do not serve goes to
FLA's function; with FASTWEIGHT_STRICT=1 it raises (_serving.py).

A caller can see these differences: fused_recurrent_* forms have gradients, H may divide HV everywhere, and gates are
not copied. FASTWEIGHT_GAIN_BOUND=2 says that step sizes and erase gates given as values may reach 2.

Gates given as logits (use_gate_in_kernel, use_beta_sigmoid_in_kernel) are fused into the kernels where the device's
kernels take logits. Elsewhere torch applies the activation in float32 before the call: _decay and _gain.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.nn.functional as F

from fastweight.torch import _plans, forward, step
from fastweight.torch._serving import NotServed, accept, checking, require, require_keys, served

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
    """Whether the library takes logits on a device of this type."""
    return _logits(device_type)


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


@served("gated_delta_rule")
def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: object = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule, rule gated_deltanet (Yang et al. 2024): chunk form, differentiable.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. g, beta: [B, T, HV], log-decay and step size.
    Arguments, defaults and results are those of fla.ops.gated_delta_rule.chunk_gated_delta_rule:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> token = torch.randn(1, 6, 2)
    >>> o, final_state = chunk_gated_delta_rule(q=q, k=k, v=v, g=-token.abs(), beta=token.sigmoid(),
    ...     output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, most_keys=_WIDE, cp_context=cp_context)
    v_first = _v_first(state_v_first, kwargs)
    raw, A_log, dt_bias = kwargs.pop("use_gate_in_kernel", False), kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    _chunk_size(kwargs, (16, 32, 64))
    bound = kwargs.pop("gain_bound", None)  # ours: of a beta that comes formed
    _no_more(kwargs)
    beta, bound = _gain(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval, bound)
    require_keys(q, _wide(bound))
    g = _decay(g, A_log, dt_bias) if raw else g
    return _run(_rule("decay=scalar gain=gate", bound, use_qk_l2norm_in_kernel), q, k, v, g=g, beta=beta, scale=scale,
                initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
                v_first=v_first)[:2]


@served("gated_delta_rule")
def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule, rule gated_deltanet (Yang et al. 2024): recurrent form, differentiable; up to 8 tokens without gradients are a decode step.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. g, beta: [B, T, HV], log-decay and step size.
    Arguments, defaults and results are those of fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> token = torch.randn(1, 6, 2)
    >>> o, final_state = fused_recurrent_gated_delta_rule(q=q, k=k, v=v, g=-token.abs(), beta=token.sigmoid(),
    ...     output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, most_keys=_WIDE, gv=gv)
    v_first = _v_first(state_v_first, kwargs)
    bound = kwargs.pop("gain_bound", None)
    _no_more(kwargs)
    if beta is None:
        beta = torch.ones_like(v[..., 0])
    if beta.dim() != 3:
        raise NotServed("beta: expected one scalar per head, [B, T, HV]; one per channel is not served")
    beta, bound = _gain(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval, bound)
    require_keys(q, _wide(bound))
    if use_gate_in_kernel:
        g = _decay(g, A_log, dt_bias, as_value=gk is not None)
    if gk is not None:
        g = gk if g is None else gk + g[..., None]
    decay = "none" if g is None else "channel" if gk is not None else "scalar"
    return _run(_rule(f"decay={decay} gain=gate", bound, use_qk_l2norm_in_kernel), q, k, v, g=g, beta=beta, scale=scale,
                initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens, v_first=v_first, recurrent=True)[:2]


def _kda(q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
         use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, **call):
    beta, bound = _gain(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    require_keys(q, _wide(bound))
    g = _decay(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g
    return _run(_rule("decay=channel gain=gate", bound, use_qk_l2norm_in_kernel), q, k, v, g=g, beta=beta, scale=scale,
                initial_state=initial_state, output_final_state=output_final_state, **call)[:2]


@served("kda")
def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention, rule kda (Kimi Linear 2025): chunk form, differentiable.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. g: [B, T, HV, K], log-decay of each key channel. beta: [B, T, HV], step size.
    Arguments, defaults and results are those of fla.ops.kda.chunk_kda:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> token = torch.randn(1, 6, 2)
    >>> channel = torch.randn(1, 6, 2, 8)
    >>> o, final_state = chunk_kda(q=q, k=k, v=v, g=-channel.abs(), beta=token.sigmoid(), output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, most_keys=_WIDE, cp_context=cp_context, return_intermediate_states=return_intermediate_states, use_graph=use_graph)
    v_first = _v_first(state_v_first, kwargs)
    A_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    _chunk_size(kwargs, (32, 64))
    _no_more(kwargs)
    return _kda(q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, v_first=v_first)


@served("kda")
def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention, rule kda (Kimi Linear 2025): recurrent form, differentiable; up to 8 tokens without gradients are a decode step.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. g: [B, T, HV, K], log-decay of each key channel. beta: [B, T, HV], step size.
    Arguments, defaults and results are those of fla.ops.kda.fused_recurrent_kda:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> token = torch.randn(1, 6, 2)
    >>> channel = torch.randn(1, 6, 2, 8)
    >>> o, final_state = fused_recurrent_kda(q=q, k=k, v=v, g=-channel.abs(), beta=token.sigmoid(),
    ...     output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, most_keys=_WIDE)
    v_first = _v_first(state_v_first, kwargs)
    _no_more(kwargs)
    if beta.dim() != 3:
        raise NotServed("beta: expected one scalar per head, [B, T, HV]; one per channel is not served")
    return _kda(q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, cu_seqlens=cu_seqlens, v_first=v_first, recurrent=True)


@served("delta_rule")
def chunk_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Delta rule without decay, rule deltanet (Yang et al. 2024): chunk form, differentiable.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. beta: [B, T, HV], step size.
    Arguments, defaults and results are those of fla.ops.delta_rule.chunk_delta_rule:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> token = torch.randn(1, 6, 2)
    >>> o, final_state = chunk_delta_rule(q=q, k=k, v=v, beta=token.sigmoid(), output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, most_keys=_wide(_BOUND))
    kwargs.pop("chunk_size", None)
    _no_more(kwargs)
    return _run(_rule("gain=gate", _BOUND, use_qk_l2norm_in_kernel), q, k, v, beta=beta, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)[:2]


@served("delta_rule")
def fused_recurrent_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Delta rule without decay, rule deltanet (Yang et al. 2024): recurrent form, differentiable; up to 8 tokens without gradients are a decode step.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. beta: [B, T, HV], step size.
    Arguments, defaults and results are those of fla.ops.delta_rule.fused_recurrent_delta_rule:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> token = torch.randn(1, 6, 2)
    >>> o, final_state = fused_recurrent_delta_rule(q=q, k=k, v=v, beta=token.sigmoid(), output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, most_keys=_wide(_BOUND))
    if beta is None:
        beta = torch.ones_like(v[..., 0])
    if beta.dim() != 3:
        raise NotServed("beta: expected one scalar per head, [B, T, HV]; one per channel is not served")
    return _run(_rule("gain=gate", _BOUND, use_qk_l2norm_in_kernel), q, k, v, beta=beta, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, cu_seqlens=cu_seqlens, recurrent=True)[:2]


def _gdn2(q, k, v, g, b, w, A_log, dt_bias, use_gate_in_kernel, lower_bound, use_qk_l2norm_in_kernel, **call):
    g = _decay(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g
    return _run(_rule("decay=channel erase=channel write=channel", _BOUND, use_qk_l2norm_in_kernel), q, k, v, g=g, erase_gate=b,
                write_gate=w, **call)[:2]


@served("gdn2")
def chunk_gdn2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    w: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: object = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated DeltaNet-2, rule gated_deltanet2: chunk form, differentiable.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. g, b: [B, T, HV, K], log-decay and erase gate. w: [B, T, HV, V], write gate.
    Arguments, defaults and results are those of fla.ops.gdn2.chunk_gdn2:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> channel = torch.randn(1, 6, 2, 8)
    >>> o, final_state = chunk_gdn2(q=q, k=k, v=v, g=-channel.abs(), b=channel.sigmoid(), w=channel.sigmoid(),
    ...     output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, most_keys=_wide(_BOUND), cp_context=cp_context, return_intermediate_states=return_intermediate_states)
    v_first = _v_first(state_v_first, kwargs)
    A_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    kwargs.pop("chunk_size", None)
    _no_more(kwargs)
    return _gdn2(q, k, v, g, b, w, A_log, dt_bias, use_gate_in_kernel, lower_bound, use_qk_l2norm_in_kernel, scale=scale, initial_state=initial_state,
                 output_final_state=output_final_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, v_first=v_first)


@served("gdn2")
def fused_recurrent_gdn2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    w: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated DeltaNet-2, rule gated_deltanet2: recurrent form, differentiable; up to 8 tokens without gradients are a decode step.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. g, b: [B, T, HV, K], log-decay and erase gate. w: [B, T, HV, V], write gate.
    Arguments, defaults and results are those of fla.ops.gdn2.fused_recurrent_gdn2:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> channel = torch.randn(1, 6, 2, 8)
    >>> o, final_state = fused_recurrent_gdn2(q=q, k=k, v=v, g=-channel.abs(), b=channel.sigmoid(), w=channel.sigmoid(),
    ...     output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, most_keys=_wide(_BOUND))
    v_first = _v_first(state_v_first, kwargs)
    _no_more(kwargs)
    return _gdn2(q, k, v, g, b, w, A_log, dt_bias, use_gate_in_kernel, lower_bound, use_qk_l2norm_in_kernel, scale=scale, initial_state=initial_state,
                 output_final_state=output_final_state, cu_seqlens=cu_seqlens, v_first=v_first, recurrent=True)


@served("gla")
def chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated linear attention, rule gla (Yang et al. 2023): chunk form, differentiable.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. g (chunk form), gk (recurrent form): [B, T, H, K], log-decay.
    Arguments, defaults and results are those of fla.ops.gla.chunk_gla:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> channel = torch.randn(1, 6, 2, 8)
    >>> o, final_state = chunk_gla(q=q, k=k, v=v, g=-channel.abs(), output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, most_keys=_WIDE)
    return _run("gla", q, k, v, g=g, scale=scale, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                cu_seqlens_cpu=cu_seqlens_cpu, v_first=state_v_first)[:2]


@served("gla")
def fused_recurrent_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated linear attention, rule gla (Yang et al. 2023): recurrent form, differentiable; up to 8 tokens without gradients are a decode step.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. g (chunk form), gk (recurrent form): [B, T, H, K], log-decay.
    Arguments, defaults and results are those of fla.ops.gla.fused_recurrent_gla:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> channel = torch.randn(1, 6, 2, 8)
    >>> o, final_state = fused_recurrent_gla(q=q, k=k, v=v, gk=-channel.abs(), output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, most_keys=_WIDE, gv=gv, reverse=reverse)
    v_first = _v_first(state_v_first, kwargs)
    _no_more(kwargs)
    return _run("linear_attention" if gk is None else "gla", q, k, v, **({} if gk is None else {"g": gk}), scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, cu_seqlens=cu_seqlens, v_first=v_first, recurrent=True)[:2]


def _simple_gla(q, k, v, g, g_gamma, **call):
    if g_gamma is not None:  # one scalar per head, the same for every token: expand() takes no memory
        constant = g_gamma.float().expand(q.shape[0], q.shape[1], v.shape[2])
        g = constant if g is None else g + constant
    return _run("linear_attention" if g is None else "mamba2", q, k, v, **({} if g is None else {"g": g}), **call)[:2]


@served("simple_gla")
def chunk_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Linear attention with one decay per head, rule mamba2 (Dao and Gu 2024): chunk form, differentiable.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. g: [B, T, HV], log-decay, or g_gamma: [HV], the same for every token.
    Arguments, defaults and results are those of fla.ops.simple_gla.chunk_simple_gla:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> token = torch.randn(1, 6, 2)
    >>> o, final_state = chunk_simple_gla(q=q, k=k, v=v, g=-token.abs(), output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, most_keys=_WIDE)
    v_first = _v_first(state_v_first, kwargs)
    kwargs.pop("chunk_size", None)
    _no_more(kwargs)
    return _simple_gla(q, k, v, g, g_gamma, scale=scale, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                       cu_seqlens_cpu=cu_seqlens_cpu, v_first=v_first)


@served("simple_gla")
def fused_recurrent_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Linear attention with one decay per head, rule mamba2 (Dao and Gu 2024): recurrent form, differentiable; up to 8 tokens without gradients are a decode step.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. g: [B, T, HV], log-decay, or g_gamma: [HV], the same for every token.
    Arguments, defaults and results are those of fla.ops.simple_gla.fused_recurrent_simple_gla:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> token = torch.randn(1, 6, 2)
    >>> o, final_state = fused_recurrent_simple_gla(q=q, k=k, v=v, g=-token.abs(), output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, most_keys=_WIDE, reverse=reverse)
    v_first = _v_first(state_v_first, kwargs)
    _no_more(kwargs)
    return _simple_gla(q, k, v, g, g_gamma, scale=scale, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                       v_first=v_first, recurrent=True)


@served("retention")
def chunk_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Retention, rule retnet (Sun et al. 2023): chunk form, differentiable.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. The decay is 1 - 2^(-5-h) of head h.
    Arguments, defaults and results are those of fla.ops.retention.chunk_retention:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> o, final_state = chunk_retention(q=q, k=k, v=v, output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, most_keys=_WIDE)
    kwargs.pop("chunk_size", None)
    _no_more(kwargs)
    return _run("retnet", q, k, v, scale=scale, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens)[:2]


@served("retention")
def fused_recurrent_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Retention, rule retnet (Sun et al. 2023): recurrent form, differentiable; up to 8 tokens without gradients are a decode step.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. The decay is 1 - 2^(-5-h) of head h.
    Arguments, defaults and results are those of fla.ops.retention.fused_recurrent_retention:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> o, final_state = fused_recurrent_retention(q=q, k=k, v=v, output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, most_keys=_WIDE, reverse=reverse)
    v_first = _v_first(state_v_first, kwargs)
    _no_more(kwargs)
    return _run("retnet", q, k, v, scale=scale, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                v_first=v_first, recurrent=True)[:2]


def _comba(q, k, v, p, g, beta, use_qk_l2norm_in_kernel, **call):
    # FLA's kernels erase from the state before this token's decay; its naive_recurrent_comba from the one after it.
    if beta is None:
        beta = torch.ones_like(v[..., 0])
    rule = _rule("decay=scalar gain=gate erase_state=previous", _BOUND, use_qk_l2norm_in_kernel)
    tensors = {"g": g, "beta": beta}
    if p is not None:
        rule += " erase_key=own"
        tensors["erase_key"] = p
    return _run(rule, q, k, v, **tensors, **call)[:2]


@served("comba")
def chunk_comba(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    p: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Comba's kernels: the erase reads the state before the token's decay: chunk form, differentiable.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. p: [B, T, H, K], erase key. g, beta: [B, T, HV], log-decay and step size.
    Arguments, defaults and results are those of fla.ops.comba.chunk_comba:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> token = torch.randn(1, 6, 2)
    >>> o, final_state = chunk_comba(q=q, k=k, v=v, p=k, g=-token.abs(), beta=token.sigmoid(), output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v)
    return _comba(q, k, v, p, g, beta, use_qk_l2norm_in_kernel, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
                  cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)


@served("comba")
def fused_recurrent_comba(
    q: torch.Tensor,
    k: torch.Tensor,
    p: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Comba's kernels: the erase reads the state before the token's decay: recurrent form, differentiable; up to 8 tokens without gradients are a decode step.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. p: [B, T, H, K], erase key. g, beta: [B, T, HV], log-decay and step size.
    Arguments, defaults and results are those of fla.ops.comba.fused_recurrent_comba:
    (o [B, T, HV, V], final state [N, HV, K, V] or None).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> token = torch.randn(1, 6, 2)
    >>> o, final_state = fused_recurrent_comba(q=q, k=k, v=v, p=k, g=-token.abs(), beta=token.sigmoid(),
    ...     output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v)
    return _comba(q, k, v, p, g, beta, use_qk_l2norm_in_kernel, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
                  cu_seqlens=cu_seqlens, recurrent=True)


def _precond(decay, q, k, v, g_atk, g, beta_atk, beta, x, eps, log_atk_scale, norm, initial_A_state, **call):
    if x > 2 or x < 1:
        raise NotServed(f"x: expected 1 to 2, got {x}")
    heads = k.shape[2]
    if log_atk_scale is None:
        log_atk_scale = -0.2
    if not isinstance(log_atk_scale, torch.Tensor):
        log_atk_scale = torch.full((heads,), float(log_atk_scale), device=k.device)
    return tuple(_run(f"decay={decay} gain=gate precond=diagonal precond_x={x} precond_eps={eps}" + _norm(norm), q, k, v, g=g, beta=beta, precond_g=g_atk,
                      precond_beta=beta_atk, precond_center=log_atk_scale, initial_precond=initial_A_state, **call))


@served("precond_gated_delta_rule")
def chunk_precond_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_atk: torch.Tensor,
    g: torch.Tensor,
    beta_atk: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_A_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-06,
    log_atk_scale: torch.Tensor | float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gated delta rule with a diagonal preconditioner, rule precond_gated_deltanet: chunk form, differentiable.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. g, beta: [B, T, HV].
    g_atk, beta_atk: [B, T, H], log-decay and step size of the preconditioner
    x: its range, 1 to 2.
    Arguments, defaults and results are those of fla.ops.precond_gated_delta_rule.chunk_precond_gated_delta_rule:
    (o [B, T, HV, V], final state [N, HV, K, V] or None, the preconditioner's final state [B, H, K]).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> token = torch.randn(1, 6, 2)
    >>> o, final_state, final_A_state = chunk_precond_gated_delta_rule(q=q, k=k, v=v, g=-token.abs(), beta=token.sigmoid(), g_atk=-token.abs(), beta_atk=token.sigmoid(),
    ...     output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, cp_context=cp_context)
    return _precond("scalar", q, k, v, g_atk, g, beta_atk, beta, x, eps, log_atk_scale, use_qk_l2norm_in_kernel, initial_A_state, scale=scale,
                    initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
                    v_first=transpose_state_layout)


@served("precond_gated_delta_rule")
def fused_recurrent_precond_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    g_atk: torch.Tensor | None = None,
    beta_atk: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_A_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-06,
    log_atk_scale: torch.Tensor | float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gated delta rule with a diagonal preconditioner, rule precond_gated_deltanet: recurrent form, differentiable; up to 8 tokens without gradients are a decode step.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. g, beta: [B, T, HV].
    g_atk, beta_atk: [B, T, H], log-decay and step size of the preconditioner
    x: its range, 1 to 2.
    Arguments, defaults and results are those of fla.ops.precond_gated_delta_rule.fused_recurrent_precond_gated_delta_rule:
    (o [B, T, HV, V], final state [N, HV, K, V] or None, the preconditioner's final state [B, H, K]).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> token = torch.randn(1, 6, 2)
    >>> o, final_state, final_A_state = fused_recurrent_precond_gated_delta_rule(q=q, k=k, v=v, g=-token.abs(), beta=token.sigmoid(), g_atk=-token.abs(), beta_atk=token.sigmoid(),
    ...     output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, gv=gv, gk=gk)
    if g is None or g_atk is None or beta_atk is None:
        raise NotServed("g, g_atk, beta_atk: expected all three, got at least one None")
    if beta is None:
        beta = torch.ones_like(v[..., 0])
    if beta.dim() != 3:
        raise NotServed("beta: expected one scalar per head, [B, T, HV]; one per channel is not served")
    return _precond("scalar", q, k, v, g_atk, g, beta_atk, beta, x, eps, log_atk_scale, use_qk_l2norm_in_kernel, initial_A_state, scale=scale,
                    initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens, v_first=transpose_state_layout,
                    recurrent=True)


@served("precond_kda")
def chunk_precond_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    g_atk: torch.Tensor,
    beta_atk: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_A_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: object = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-06,
    log_atk_scale: torch.Tensor | float | None = None,
    solve_tril_precision: object = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Kimi Delta Attention with a diagonal preconditioner, rule precond_kda: chunk form, differentiable.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. g: [B, T, HV, K]. beta: [B, T, HV].
    g_atk, beta_atk: [B, T, H], log-decay and step size of the preconditioner
    x: its range, 1 to 2.
    Arguments, defaults and results are those of fla.ops.precond_kda.chunk_precond_kda:
    (o [B, T, HV, V], final state [N, HV, K, V] or None, the preconditioner's final state [B, H, K]).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> token = torch.randn(1, 6, 2)
    >>> channel = torch.randn(1, 6, 2, 8)
    >>> o, final_state, final_A_state = chunk_precond_kda(q=q, k=k, v=v, g=-channel.abs(), beta=token.sigmoid(), g_atk=-token.abs(), beta_atk=token.sigmoid(),
    ...     output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v, cp_context=cp_context, return_intermediate_states=return_intermediate_states)
    A_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    norm = kwargs.pop("use_qk_l2norm_in_kernel", True)
    kwargs.pop("chunk_size", None)
    _no_more(kwargs)
    g = _decay(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g
    return _precond("channel", q, k, v, g_atk, g, beta_atk, beta, x, eps, log_atk_scale, norm, initial_A_state, scale=scale,
                    initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
                    v_first=transpose_state_layout)


@served("precond_kda")
def fused_recurrent_precond_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    g_atk: torch.Tensor,
    beta_atk: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    initial_A_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-06,
    log_atk_scale: torch.Tensor | float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Kimi Delta Attention with a diagonal preconditioner, rule precond_kda: recurrent form, differentiable; up to 8 tokens without gradients are a decode step.

    q, k: [B, T, H, K]; v: [B, T, HV, V]. g: [B, T, HV, K]. beta: [B, T, HV].
    g_atk, beta_atk: [B, T, H], log-decay and step size of the preconditioner
    x: its range, 1 to 2.
    Arguments, defaults and results are those of fla.ops.precond_kda.fused_recurrent_precond_kda:
    (o [B, T, HV, V], final state [N, HV, K, V] or None, the preconditioner's final state [B, H, K]).
    A call that these kernels do not serve goes to that function, or raises NotServed.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> token = torch.randn(1, 6, 2)
    >>> channel = torch.randn(1, 6, 2, 8)
    >>> o, final_state, final_A_state = fused_recurrent_precond_kda(q=q, k=k, v=v, g=-channel.abs(), beta=token.sigmoid(), g_atk=-token.abs(), beta_atk=token.sigmoid(),
    ...     output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    require(q, k, v)
    _no_more(kwargs)
    g = _decay(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g
    return _precond("channel", q, k, v, g_atk, g, beta_atk, beta, x, eps, log_atk_scale, use_qk_l2norm_in_kernel, initial_A_state, scale=scale,
                    initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens, v_first=transpose_state_layout,
                    recurrent=True)


__all__ = [name for name, value in list(globals().items()) if hasattr(value, "module") and name.startswith(("chunk_", "fused_"))]


def __dir__() -> list[str]:
    return list(__all__)
