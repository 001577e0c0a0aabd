"""SGLang's calls of gated delta rules: register() (entry point sglang.srt.plugins), and the call conventions as functions.

Inert unless FASTWEIGHT_SGLANG=1. Then decode, packed_decode, extend and target_verify of SGLang's TritonGDNKernel (0.5.23) run on these kernels; a call with what they
do not take goes to SGLang's own, or raises with FASTWEIGHT_STRICT=1. Nothing here was run inside an SGLang server or on a GPU.

ssm_states (one layer's pool): [slots, HV, V, K]; a negative slot is skipped and its output zero. q, k, v [1, T, heads, dim], one sequence behind the other.
"""

from __future__ import annotations

import importlib
import inspect

import torch

from fastweight import _servers
from fastweight.torch import _serving, pools

_MODULES = ("sglang.srt.layers.attention.linear.kernels.gdn_triton", "sglang.srt.layers.attention.linear.kernels.triton_gdn")
_CLASS = "TritonGDNKernel"


def _rows(x):
    """[1, N, ...] as [N, 1, ...]."""
    return x.transpose(0, 1)


def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *,
    A_log: torch.Tensor, dt_bias: torch.Tensor, ssm_states: torch.Tensor, cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor | None = None, **kwargs: object,
) -> torch.Tensor:
    """o [1, N, HV, V] of one token per sequence; a, b: [N, HV].

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 1, 2, 8)
    >>> a, b, A_log, dt_bias = torch.randn(4, 1, 2)
    >>> pool, slots = torch.zeros(3, 2, 8, 8), torch.tensor([1])
    >>> decode(q, k, v, a, b, A_log=A_log[0], dt_bias=dt_bias[0], ssm_states=pool, cache_indices=slots).shape
    torch.Size([1, 1, 2, 8])
    """
    _servers.refuse(kwargs)
    _serving.require(q, k, v)
    _servers.one_token_each(q.shape[1], cache_indices.shape[0])
    a, b = a.reshape(-1, 1, v.shape[2]), b.reshape(-1, 1, v.shape[2])
    return _rows(pools.decode(_servers.RULE, _rows(q), _rows(k), _rows(v), ssm_states, cache_indices, **_servers.gates_of(a, b, A_log, dt_bias)))


def packed_decode(
    mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *,
    A_log: torch.Tensor, dt_bias: torch.Tensor, scale: float | None, ssm_states: torch.Tensor,
    cache_indices: torch.Tensor, num_v_heads: int, head_v_dim: int, **kwargs: object,
) -> torch.Tensor:
    """decode() with q, k and v in one row: mixed_qkv [N, 2 H K + HV V], after the convolution.

    >>> import torch
    >>> a, b, A_log, dt_bias = torch.randn(4, 1, 2)
    >>> packed_decode(torch.randn(1, 48), a, b, A_log=A_log[0], dt_bias=dt_bias[0], scale=None, num_v_heads=2,
    ...               head_v_dim=8, ssm_states=torch.zeros(3, 2, 8, 8), cache_indices=torch.tensor([1])).shape
    torch.Size([1, 1, 2, 8])
    """
    _servers.refuse(kwargs)
    q, k, v = _servers.split_row(mixed_qkv, num_v_heads, head_v_dim, ssm_states.shape[-1])
    _serving.require(q, k, v)
    return _rows(pools.decode(_servers.RULE, q, k, v, ssm_states, cache_indices, scale=scale, **_servers.gates_of(a[:, None], b[:, None], A_log, dt_bias)))


def extend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *,
    ssm_states: torch.Tensor, cache_indices: torch.Tensor, query_start_loc: torch.Tensor, inplace_update: bool = True,
    **kwargs: object,
) -> tuple[torch.Tensor, None, None]:
    """(o [1, T, HV, V], None, None): prefill from the pool's states and into them.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
    >>> extend(q, k, v, -torch.rand(1, 5, 2), torch.rand(1, 5, 2), ssm_states=torch.zeros(3, 2, 8, 8),
    ...        cache_indices=torch.tensor([0, 2]), query_start_loc=torch.tensor([0, 3, 5]))[0].shape
    torch.Size([1, 5, 2, 8])
    """
    _servers.refuse(kwargs)
    _serving.require(q, k, v)
    o = pools.extend(_servers.RULE, q, k, v, ssm_states, cache_indices, query_start_loc, update=inplace_update, g=g, beta=beta)
    return o, None, None


def _verify(q, k, v, gates, per_token, ssm_states, cache_indices, query_start_loc, buffer, indices, cache_steps, retrieve_parent_token, kwargs):
    _servers.refuse(kwargs)
    if retrieve_parent_token is not None:
        raise _serving.NotServed("retrieve_parent_token: a tree of drafted tokens takes kernels that go back to a parent's state, which this library has not")
    _serving.require(q, k, v)
    if pools.takes(ssm_states, buffer) and buffer.stride(0) == buffer.shape[1] * buffer.stride(1):
        steps = torch.arange(cache_steps, device=indices.device, dtype=torch.int32)
        return pools.speculate(_servers.RULE, q, k, v, ssm_states, indices[:, None] * buffer.shape[1] + steps, query_start_loc, slots=cache_indices,
                               into=buffer.flatten(0, 1), **gates)

    def store(t, states, there):
        buffer[indices[there].long(), t] = states[there].to(buffer.dtype)

    return pools.verify(_servers.RULE, q, k, v, ssm_states, cache_indices, query_start_loc, cache_steps, store, per_token=per_token, **gates)


def target_verify(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *,
    ssm_states: torch.Tensor, cache_indices: torch.Tensor, query_start_loc: torch.Tensor,
    intermediate_states_buffer: torch.Tensor, intermediate_state_indices: torch.Tensor, cache_steps: int,
    retrieve_parent_token: torch.Tensor | None = None, **kwargs: object,
) -> torch.Tensor:
    """o [1, T, HV, V] of at most cache_steps drafted tokens per sequence; the pool's states are unchanged.

    The state after token t goes to intermediate_states_buffer [slots, steps, HV, V, K] at
    [intermediate_state_indices[n], t].

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 2, 8)
    >>> target_verify(q, k, v, -torch.rand(1, 2, 2), torch.rand(1, 2, 2), ssm_states=torch.zeros(3, 2, 8, 8),
    ...               cache_indices=torch.tensor([1]), query_start_loc=torch.tensor([0, 2]), cache_steps=2,
    ...               intermediate_states_buffer=torch.zeros(1, 2, 2, 8, 8), intermediate_state_indices=torch.tensor([0])).shape
    torch.Size([1, 2, 2, 8])
    """
    return _verify(q, k, v, {"g": g, "beta": beta}, ("g", "beta"), ssm_states, cache_indices, query_start_loc, intermediate_states_buffer,
                   intermediate_state_indices, cache_steps, retrieve_parent_token, kwargs)


def target_verify_raw(
    A_log: torch.Tensor, dt_bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    a: torch.Tensor, b: torch.Tensor, *, ssm_states: torch.Tensor, cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor, intermediate_states_buffer: torch.Tensor, intermediate_state_indices: torch.Tensor,
    cache_steps: int, retrieve_parent_token: torch.Tensor | None = None, **kwargs: object,
) -> torch.Tensor:
    """target_verify() with gates as logits a, b: [T, HV], as SGLang 0.5.23 calls it.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 2, 8)
    >>> target_verify_raw(*torch.randn(2, 2), q, k, v, *torch.randn(2, 2, 2), ssm_states=torch.zeros(3, 2, 8, 8),
    ...                   cache_indices=torch.tensor([1]), query_start_loc=torch.tensor([0, 2]), cache_steps=2,
    ...                   intermediate_states_buffer=torch.zeros(1, 2, 2, 8, 8), intermediate_state_indices=torch.tensor([0])).shape
    torch.Size([1, 2, 2, 8])
    """
    heads = v.shape[2]
    gates = _servers.gates_of(a.reshape(1, -1, heads), b.reshape(1, -1, heads), A_log, dt_bias)
    return _verify(q, k, v, gates, ("g", "beta"), ssm_states, cache_indices, query_start_loc, intermediate_states_buffer, intermediate_state_indices, cache_steps,
                   retrieve_parent_token, kwargs)


def _method(name, function, theirs):
    def run(self, *args, **kwargs):
        return _serving.attempt("sglang." + name, function, lambda: theirs(self, *args, **kwargs), args, kwargs)

    run.fastweight = True
    return run


def register() -> bool:
    """The plugin's entry point: SGLang calls it in each process. True if the kernel's methods are replaced.

    Raises ImportError with FASTWEIGHT_SGLANG=1 where SGLang has no such kernel.

    >>> import os
    >>> _ = os.environ.pop("FASTWEIGHT_SGLANG", None)
    >>> register()
    False
    """
    if not _servers.asked("FASTWEIGHT_SGLANG"):
        return False
    kernel = None
    for name in _MODULES:
        try:
            kernel = getattr(importlib.import_module(name), _CLASS, None)
        except ImportError:
            continue
        if kernel is not None:
            break
    if kernel is None:
        raise ImportError(f"FASTWEIGHT_SGLANG=1: expected an SGLang with {_CLASS} in {' or '.join(_MODULES)} (0.5.23), found none; unset the variable to go on without")
    for name, function in (("decode", decode), ("packed_decode", packed_decode), ("extend", extend), ("target_verify", target_verify)):
        theirs = getattr(kernel, name, None)
        if theirs is None or hasattr(theirs, "fastweight"):
            continue
        if name == "target_verify" and "A_log" in inspect.signature(theirs).parameters:
            function = target_verify_raw
        setattr(kernel, name, _method(name, function, theirs))
    return True


__all__ = ["decode", "extend", "packed_decode", "register", "target_verify", "target_verify_raw"]


def __dir__() -> list[str]:
    return list(__all__)
