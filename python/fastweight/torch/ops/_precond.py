"""Delta rules with a diagonal preconditioner: precond_gated_delta_rule, precond_kda."""

from __future__ import annotations

import torch

from fastweight.torch._serving import NotServed, require, served
from fastweight.torch.ops._common import _no_more, _decay, _norm, _run


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
