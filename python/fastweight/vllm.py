"""vLLM's calls of gated delta rules: register() (entry point vllm.general_plugins), and the call conventions as functions.

Inert unless FASTWEIGHT_VLLM=1. Then prefill of the gated delta rule (vLLM's ChunkGatedDeltaRule, 0.33) runs on these kernels; a call with what they do
not take goes to vLLM's own, or raises with FASTWEIGHT_STRICT=1. decode() and speculative() serve a program that calls them; vLLM has no place to put
them in without a change of its layers. Nothing here was run inside a vLLM server or on a GPU.

pool: [blocks, HV, V, K]; block 0 is nobody's: a slot of 0 or below is skipped and its output zero.
"""

import importlib

import torch

from fastweight import _servers
from fastweight.torch import _serving, forward, pools

_MODULES = ("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn", "vllm.model_executor.models.qwen3_next")
_OPERATION = "ChunkGatedDeltaRule"
_FIRST_SLOT = 1


def prefill(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None, use_qk_l2norm_in_kernel=True, **kwargs):
    """o [1, T, HV, V], final states [N, HV, V, K] or None; initial_state gathered by the caller, g the log-decay in float32, cu_seqlens on any device (its values
    are fetched once for a tensor that does not change)."""
    _servers.refuse(kwargs)
    _serving.require(q, k, v)
    rule = _servers.RULE if use_qk_l2norm_in_kernel else _servers.RULE_NORMED
    o, state, _ = forward(rule, q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
                          state_v_first=True)
    return o, state if state is None or initial_state is None else state.to(initial_state.dtype)


def decode(mixed_qkv, a, b, A_log, dt_bias, pool, ssm_state_indices, scale=None, out=None):
    """One token of each of N sequences: mixed_qkv [N, 2 H K + HV V] behind the convolution, a, b [N, HV], ssm_state_indices [N]. Returns o [N, 1, HV, V], in out
    if given; the pool's states go on."""
    heads, value_dim, key_dim = pool.shape[1:]
    q, k, v = _servers.split_row(mixed_qkv, heads, value_dim, key_dim)
    _serving.require(q, k, v)
    o = pools.decode(_servers.RULE, q, k, v, pool, ssm_state_indices, first_slot=_FIRST_SLOT, scale=scale, **_servers.gates_of(a[:, None], b[:, None], A_log, dt_bias))
    return o if out is None else out.copy_(o)


def speculative(q, k, v, g, beta, pool, ssm_state_indices, num_accepted_tokens, cu_seqlens, scale=None, use_qk_l2norm_in_kernel=True):
    """At most S + 1 drafted tokens a sequence, packed [1, T, ...]; ssm_state_indices [N, S + 1]: the sequence begins at the state of
    [n, num_accepted_tokens[n] - 1], and its state after token t is stored at [n, t]. Returns o [1, T, HV, V]."""
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


def register():
    """Called by vLLM in each of its processes, more than once. True if the operation is ours now."""
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
