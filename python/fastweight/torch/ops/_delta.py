"""Delta rules: gated_delta_rule, kda, delta_rule, gdn2. The package has the contract of all."""

from __future__ import annotations

import torch

from fastweight.torch._serving import NotServed, require, require_keys, served
from fastweight.torch.ops._common import _BOUND, _WIDE, _wide, _rule, _no_more, _chunk_size, _v_first, _decay, _gain, _run


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
