"""Linear attention without an erase: gla, simple_gla, retention."""

from __future__ import annotations

import torch

from fastweight.torch._serving import require, served
from fastweight.torch.ops._common import _WIDE, _no_more, _v_first, _run


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
