"""States in a pool, as servers keep them: decode(), extend(), verify(), speculate().

pool is [slots, HV, V, K] (state_v_first=True, the default here) or [slots, HV, K, V], with any strides and any floating
dtype. A sequence has its state at its slot. A slot below `first_slot` means "none" (0: negative slots; 1: slot 0 too):
the sequence is not computed, its output is zero, and the pool is unchanged.

The kernels read and write pools in place where takes() says so; such calls can be captured in a CUDA graph, extend()
with max_seqlen. States of other pools are gathered and scattered, which waits for the device and cannot be captured.
"""

from __future__ import annotations

import typing

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


def decode(
    rule: str, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, *,
    first_slot: int = 0, state_v_first: bool = True, **call: object,
) -> torch.Tensor:
    """o [N, 1, HV, V] of one token per sequence; the states in the pool are updated.

    q, k: [N, 1, H, K]. v: [N, 1, HV, V]. slots: int32 or int64 [N]. call: other arguments of fastweight.torch.step.

    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 1, 1, 4)
    >>> pool = torch.zeros(3, 1, 4, 4)
    >>> o = decode("deltanet", q, k, v, pool, torch.tensor([2, -1]), beta=torch.ones(2, 1, 1))
    >>> pool.flatten(1).any(1).tolist(), bool(o[1].any())
    ([False, False, True], False)
    """
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
    """bool [count]: which tokens of packed sequences are of a sequence that has a slot; tokens after the last sequence are of none."""
    sequence = torch.searchsorted(cu_seqlens[1:].to(there.device).contiguous(), torch.arange(count, device=there.device, dtype=cu_seqlens.dtype), right=True)
    return torch.cat([there, there.new_zeros(1)])[sequence]


def extend(
    rule: str, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor,
    cu_seqlens: torch.Tensor, *, cu_seqlens_cpu: torch.Tensor | None = None, max_seqlen: int | None = None,
    first_slot: int = 0, has_state: torch.Tensor | None = None, update: bool = True, state_v_first: bool = True,
    **call: object,
) -> torch.Tensor:
    """o [1, T, HV, V] of packed sequences, each from its state in the pool, which becomes its final state.

    cu_seqlens: [N + 1]; max_seqlen: as in fastweight.torch.forward. slots: int32 or int64 [N].
    has_state: bool [N], which sequences start from their state, the others from zero; None: all do.
    update: False leaves the pool as it is. call: other arguments of fastweight.torch.prefill.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 5, 1, 4)
    >>> pool, offsets = torch.zeros(3, 1, 4, 4), torch.tensor([0, 3, 5])
    >>> o = extend("deltanet", q, k, v, pool, torch.tensor([0, 2]), offsets, beta=torch.ones(1, 5, 1))
    >>> o.shape, pool.flatten(1).any(1).tolist()
    (torch.Size([1, 5, 1, 4]), [True, False, True])
    """
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


def takes(*pools: torch.Tensor) -> bool:
    """Whether the kernels read and write these pools in place: float32 or bfloat16, the last dimension contiguous.

    >>> import torch
    >>> takes(torch.zeros(3, 1, 4, 4)), takes(torch.zeros(3, 1, 4, 4, dtype=torch.float16))
    (True, False)
    """
    return all(p.stride(-1) == 1 and p.dtype in (torch.float32, torch.bfloat16) for p in pools)


def speculate(
    rule: str, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor, pool: torch.Tensor, token_slots: torch.Tensor,
    cu_seqlens: torch.Tensor, *, accepted: torch.Tensor | None = None, slots: torch.Tensor | None = None,
    into: torch.Tensor | None = None, first_slot: int = 0, state_v_first: bool = True, **call: object,
) -> torch.Tensor:
    """o [1, T, HV, V] of drafted tokens, packed. Nothing waits for the device.

    token_slots: [N, columns], at most `columns` tokens per sequence. The state after token t of sequence n goes to slot
        token_slots[n, t] of the pool `into` (None: the same pool).
    accepted: [N], the sequence starts at slot token_slots[n, accepted[n] - 1]; slots: [N], or at slots[n].
    call: other arguments of fastweight.torch.speculate.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 1, 4)
    >>> pool, drafted = torch.zeros(3, 1, 4, 4), torch.tensor([[1, 2]])
    >>> o = speculate("deltanet", q, k, v, pool, drafted, torch.tensor([0, 2]), slots=torch.tensor([0]), beta=torch.ones(1, 2, 1))
    >>> pool.flatten(1).any(1).tolist()
    [False, True, True]
    """
    _check(pool, token_slots[:, 0], v, state_v_first)

    def numbers(x):
        return None if x is None else x.to(torch.int32).contiguous()

    return _speculate(rule, q, k, v, pool, numbers(token_slots), accepted=numbers(accepted), slots=numbers(slots), token_states=into, first_slot=first_slot,
                      cu_seqlens=cu_seqlens, max_seqlen=token_slots.shape[1], state_v_first=state_v_first, **call)


def verify(
    rule: str, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor,
    cu_seqlens: torch.Tensor, steps: int, store: typing.Callable[[int, torch.Tensor, torch.Tensor], None], *,
    first_slot: int = 0, round_to: torch.dtype | None = None, state_v_first: bool = True,
    per_token: typing.Sequence[str] = (), **call: object,
) -> torch.Tensor:
    """o [1, T, HV, V] of at most `steps` drafted tokens per sequence; the pool is unchanged. Waits for the device.

    slots: [N], where the sequences start. store: called as store(t, states [N, ...], present bool [N]) after token t,
        to keep the states of the sequences that have such a token.
    round_to: a dtype that states are rounded to after every token; None: none.
    per_token: names of `call` that are tensors of tokens, [1, T, ...]. call: other arguments of fastweight.torch.step.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 1, 4)
    >>> pool, kept = torch.zeros(1, 1, 4, 4), []
    >>> o = verify("deltanet", q, k, v, pool, torch.tensor([0]), torch.tensor([0, 2]), 2,
    ...            lambda t, states, present: kept.append(states), beta=torch.ones(1, 2, 1), per_token=("beta",))
    >>> len(kept), kept[0].shape
    (2, torch.Size([1, 1, 4, 4]))
    """
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


def __dir__() -> list[str]:
    return list(__all__)
