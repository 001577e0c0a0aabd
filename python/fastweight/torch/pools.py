"""States in a pool, as servers keep them: decode(), extend(), verify(), speculate().

pool [slots, HV, V, K] (state_v_first; else [slots, HV, K, V]), with any strides and of any floating type; a sequence's state lies at its slot, and a slot below
`first_slot` means that there is none (0: negative ones; 1: slot 0 too): the sequence is not computed, its outputs are zero and the pool keeps what it has.
decode() on CUDA, and extend() and speculate() of pools of which takes() says so, read and write them themselves; with `max_seqlen` extend() may be captured, as the
others may. Else states are gathered and put back, which waits for the device, so that a capture is refused.
"""

import torch

from fastweight.torch import forward, prefill, step
from fastweight.torch import speculate as _speculate
from fastweight.torch._serving import NotServed

__all__ = ["decode", "extend", "speculate", "takes", "verify"]


def _waits(what, tensor):
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotServed(f"{what}: waits for the device, which a CUDA graph cannot capture; kernels that read slots and offsets there are not in this library")


def _check(pool, slots, v, v_first):
    shape = (v.shape[2], v.shape[3]) if v_first else (v.shape[2],)
    found = tuple(pool.shape[1:3]) if v_first else tuple(pool.shape[1:2])
    if pool.dim() != 4 or found != shape:
        raise ValueError(f"pool: expected [slots, HV, {'V, K' if v_first else 'K, V'}] with {shape} after the slots, got shape {list(pool.shape)}")
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots: expected int32 or int64 of one dimension, got {slots.dtype} of shape {list(slots.shape)}")


def _gathered(pool, slots):
    return pool.index_select(0, slots.clamp(min=0).long()).float()


def _put(pool, slots, first_slot, states):
    there = slots >= first_slot
    pool[slots[there].long()] = states[there].to(pool.dtype)


def decode(rule, q, k, v, pool, slots, *, first_slot=0, state_v_first=True, **call):
    """o [N, 1, HV, V] of one token a sequence: q, k, v [N, 1, heads, dim], slots [N]; the states in the pool go one token on."""
    _check(pool, slots, v, state_v_first)
    there = slots >= first_slot
    if takes(pool):
        o = step(rule, q, k, v, pool, slots=torch.where(there, slots, -1).int(), state_v_first=state_v_first, **call)
        return torch.where(there[:, None, None, None], o, 0)  # o of a skipped one is not written
    states = _gathered(pool, slots)
    o = step(rule, q, k, v, states, state_v_first=state_v_first, **call)
    _put(pool, slots, first_slot, states)
    return o.masked_fill_(~there[:, None, None, None], 0)


def _rows_of(there, cu_seqlens, count):
    """bool [count]: of the rows of packed sequences those whose sequence is there; rows behind the last sequence are of none."""
    sequence = torch.searchsorted(cu_seqlens[1:].to(there.device).contiguous(), torch.arange(count, device=there.device, dtype=cu_seqlens.dtype), right=True)
    return torch.cat([there, there.new_zeros(1)])[sequence]


def extend(rule, q, k, v, pool, slots, cu_seqlens, *, cu_seqlens_cpu=None, max_seqlen=None, first_slot=0, has_state=None, update=True, state_v_first=True,
           **call):
    """o [1, T, HV, V] of sequences one after the other, each from its state in the pool (has_state, bool [N]: those that have one; else all), which then is the
    state after it (unless update is False). max_seqlen: no sequence is longer, and offsets on a device stay there."""
    _check(pool, slots, v, state_v_first)
    there = slots >= first_slot
    begins = there if has_state is None else there & has_state.to(there.device)
    if takes(pool) and not any(isinstance(x, torch.Tensor) and x.requires_grad for x in (q, k, v, *call.values())):
        own, ends = (torch.where(which, slots, -1).int() for which in (begins, there))
        o = prefill(rule, q, k, v, pool, own, final_slots=ends, update=update, cu_seqlens=cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu,
                    max_seqlen=max_seqlen, state_v_first=state_v_first, **call)
        return o.masked_fill(~_rows_of(there, cu_seqlens, o.shape[1])[None, :, None, None], 0)
    _waits("extend", q)
    states = torch.where(begins[:, None, None, None], _gathered(pool, slots), 0)
    o, states, _ = forward(rule, q, k, v, initial_state=states, output_final_state=update, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
                           state_v_first=state_v_first, **call)
    if update:
        _put(pool, slots, first_slot, states)
    return o.masked_fill(~_rows_of(there, cu_seqlens, o.shape[1])[None, :, None, None], 0)


def takes(*pools):
    """Whether the kernels read and write such pools themselves: states of float32 or bfloat16 whose last dimension is contiguous."""
    return all(p.stride(-1) == 1 and p.dtype in (torch.float32, torch.bfloat16) for p in pools)


def speculate(rule, q, k, v, pool, token_slots, cu_seqlens, *, accepted=None, slots=None, into=None, first_slot=0, state_v_first=True, **call):
    """o [1, T, HV, V] of drafted tokens, at most as many a sequence as token_slots [N, columns] has columns: the state after token t goes to slot [n, t] of the
    pool `into` (pool itself if None), from the state at slot [n, accepted[n] - 1], or at slots [n], of pool. Nothing waits for the device."""
    _check(pool, token_slots[:, 0], v, state_v_first)

    def numbers(x):
        return None if x is None else x.to(torch.int32).contiguous()

    return _speculate(rule, q, k, v, pool, numbers(token_slots), accepted=numbers(accepted), slots=numbers(slots), token_states=into, first_slot=first_slot,
                      cu_seqlens=cu_seqlens, max_seqlen=token_slots.shape[1], state_v_first=state_v_first, **call)


def verify(rule, q, k, v, pool, slots, cu_seqlens, steps, store, *, first_slot=0, round_to=None, state_v_first=True, per_token=(), **call):
    """o [1, T, HV, V] of at most `steps` drafted tokens a sequence, from the states at slots [N], which stay; after token t of the sequences of which
    there is one (bool [N]) store(t, states [N, ...], there) is called, to keep them where the server goes on from when so many tokens are accepted.

    round_to: a type that states are rounded to after every token. per_token: names of `call` that are tensors of tokens, [1, T, ...]."""
    _check(pool, slots, v, state_v_first)
    _waits("verify", q)
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    states = _gathered(pool, slots)
    out = q.new_zeros((1, v.shape[1], v.shape[2], v.shape[3]))
    for t in range(steps):
        there = (begin + t < end) & (slots >= first_slot)
        rows = (begin + t).clamp(max=v.shape[1] - 1)
        token = [x[0].index_select(0, rows)[:, None] for x in (q, k, v)]
        gates = {name: call[name][0].index_select(0, rows)[:, None] for name in per_token}
        after = states.clone()
        o = step(rule, *token, after, state_v_first=state_v_first, **{**call, **gates})
        if round_to is not None:
            after = after.to(round_to).float()
        states = torch.where(there[:, None, None, None], after, states)
        out[0, rows[there]] = o[there, 0]
        store(t, states, there)
    return out
