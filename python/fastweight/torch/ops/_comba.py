"""Comba: an erase key of its own, and an erase that reads the state before its decay."""

from __future__ import annotations

import torch

from fastweight.torch._serving import require, served
from fastweight.torch.ops._common import _BOUND, _rule, _run


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
