"""vLLM's calls of gated delta rules: register() (entry point vllm.general_plugins), and the call conventions as functions.

Inert unless FASTWEIGHT_VLLM=1. Then prefill of the gated delta rule (vLLM's ChunkGatedDeltaRule, 0.33) runs on these kernels; a call with what they do
not take goes to vLLM's own, or raises with FASTWEIGHT_STRICT=1. decode() and speculative() serve a program that calls them; vLLM has no place to put
them in without a change of its layers. Nothing here was run inside a vLLM server or on a GPU.

pool: [blocks, HV, V, K]. Block 0 is never used: a sequence with a slot of 0 or below is skipped, and its output is zero.
"""

from __future__ import annotations

import importlib

import torch

from fastweight import _servers
from fastweight.torch import _serving, forward, pools

_MODULES = ("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn", "vllm.model_executor.models.qwen3_next")
_OPERATION = "ChunkGatedDeltaRule"
_FIRST_SLOT = 1


def prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor | None, output_final_state: bool, cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True, **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o [1, T, HV, V], final states [N, HV, V, K] or None) of packed prompts.

    g: log-decay, float32 [1, T, HV]. initial_state: [N, HV, V, K], gathered by the caller. cu_seqlens: [N + 1], on any
    device; copied to the host once for a tensor that does not change.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 3, 2, 8)
    >>> o, state = prefill(q, k, v, -torch.rand(1, 3, 2), torch.rand(1, 3, 2), None, True)
    >>> o.shape, state.shape
    (torch.Size([1, 3, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    _servers.refuse(kwargs)
    _serving.require(q, k, v)
    rule = _servers.RULE if use_qk_l2norm_in_kernel else _servers.RULE_NORMED
    o, state, _ = forward(rule, q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                          state_v_first=True)
    return o, state if state is None or initial_state is None else state.to(initial_state.dtype)


def decode(
    mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    pool: torch.Tensor, ssm_state_indices: torch.Tensor, scale: float | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:
    """o [N, 1, HV, V] of one token per sequence, in `out` if given; the pool's states are updated.

    mixed_qkv: [N, 2 H K + HV V], after the convolution. a, b: [N, HV]. ssm_state_indices: [N].

    >>> import torch
    >>> pool = torch.zeros(3, 2, 8, 8)
    >>> decode(torch.randn(1, 48), *torch.randn(2, 1, 2), *torch.randn(2, 2), pool, torch.tensor([1])).shape
    torch.Size([1, 1, 2, 8])
    """
    heads, value_dim, key_dim = pool.shape[1:]
    q, k, v = _servers.split_row(mixed_qkv, heads, value_dim, key_dim)
    _serving.require(q, k, v)
    o = pools.decode(_servers.RULE, q, k, v, pool, ssm_state_indices, first_slot=_FIRST_SLOT, scale=scale, **_servers.gates_of(a[:, None], b[:, None], A_log, dt_bias))
    return o if out is None else out.copy_(o)


def speculative(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, pool: torch.Tensor,
    ssm_state_indices: torch.Tensor, num_accepted_tokens: torch.Tensor, cu_seqlens: torch.Tensor,
    scale: float | None = None, use_qk_l2norm_in_kernel: bool = True,
) -> torch.Tensor:
    """o [1, T, HV, V] of at most S + 1 drafted tokens per sequence, packed.

    ssm_state_indices: [N, S + 1]. Sequence n starts at the slot of [n, num_accepted_tokens[n] - 1], and its state after
    token t goes to the slot of [n, t].

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 2, 8)
    >>> pool, slots, one = torch.zeros(3, 2, 8, 8), torch.tensor([[1, 2]]), torch.tensor([1])
    >>> speculative(q, k, v, -torch.rand(1, 2, 2), torch.rand(1, 2, 2), pool, slots, one, torch.tensor([0, 2])).shape
    torch.Size([1, 2, 2, 8])
    """
    _serving.require(q, k, v)
    rule = _servers.RULE if use_qk_l2norm_in_kernel else _servers.RULE_NORMED
    if pools.takes(pool):
        return pools.speculate(rule, q, k, v, pool, ssm_state_indices, cu_seqlens, accepted=num_accepted_tokens, first_slot=_FIRST_SLOT, scale=scale, g=g, beta=beta)
    indices = ssm_state_indices.long()
    begin = indices.gather(1, (num_accepted_tokens.long() - 1).clamp(min=0)[:, None])[:, 0]

    def store(t, states, there):
        pools._put(pool, torch.where(there, indices[:, t], 0), _FIRST_SLOT, states)

    return pools.verify(rule, q, k, v, pool, begin, cu_seqlens, indices.shape[1], store, first_slot=_FIRST_SLOT, scale=scale, g=g, beta=beta,
                        per_token=("g", "beta"))


def _operation(base):
    def run(self, *args, **kwargs):
        return _serving.attempt("vllm." + _OPERATION, prefill, lambda: base.forward_native(self, *args, **kwargs), args, kwargs)

    def __init__(self, *args, **kwargs):
        base.__init__(self, *args, **kwargs)
        self._forward_method = self.forward_cuda

    return type("Fastweight" + _OPERATION, (base,), {"__init__": __init__, "forward_cuda": run, "forward_native": run, "forward_oot": run})


def register() -> bool:
    """The plugin's entry point: vLLM calls it in each process, possibly several times. True if the operation is replaced.

    Raises ImportError with FASTWEIGHT_VLLM=1 where vLLM has no such operation.

    >>> import os
    >>> _ = os.environ.pop("FASTWEIGHT_VLLM", None)
    >>> register()
    False
    """
    if not _servers.asked("FASTWEIGHT_VLLM"):
        return False
    custom_op = importlib.import_module("vllm.model_executor.custom_op").CustomOp
    base = None
    for name in _MODULES:
        try:
            base = getattr(importlib.import_module(name), _OPERATION, None)
        except ImportError:
            continue
        if base is not None:
            break
    if base is None:
        raise ImportError(f"FASTWEIGHT_VLLM=1: expected a vLLM with {_OPERATION} in {' or '.join(_MODULES)} (0.33), found none; unset the variable to go on without")
    if getattr(base, "fastweight", False) or _OPERATION in getattr(custom_op, "op_registry_oot", {}):
        return True  # it asserts that nobody registers twice
    ours = _operation(base)
    ours.fastweight = True
    custom_op.register_oot(name=_OPERATION)(ours)
    return True


__all__ = ["decode", "prefill", "register", "speculative"]


def __dir__() -> list[str]:
    return list(__all__)
