"""The recurrence on PyTorch tensors: forward (differentiable), backward, step, replay, prefill, speculate, set_form, plan_text.

    >>> import torch
    >>> from fastweight.torch import forward
    >>> q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))        # [B, T, H, K], [B, T, HV, V]
    >>> g, beta = -torch.rand(1, 6, 2), torch.rand(1, 6, 2)          # log-decay and step size, [B, T, HV]
    >>> o, final_state, _ = forward("gated_deltanet", q, k, v, g=g, beta=beta, output_final_state=True)
    >>> o.shape, final_state.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 8, 8]))

Letters: B batch, T tokens, N sequences (B without cu_seqlens), H key heads, HV value heads (a multiple of H), K key
dimension, V value dimension. fastweight.rules.describe(rule) says which tensors a rule takes, and their shapes.

dtypes: tensors of tokens are float32, bfloat16 or float16, each on its own, or float64 on the CPU. o has the dtype of q,
gradients have those of their inputs, states are float32 (float64 in a call of float64).

torch.compile and torch.export take these calls into their graphs. Second derivatives, forward mode and torch.func's
derivatives are refused. Errors are
fastweight.Error (a ValueError), which names the argument, or fastweight.DeviceError. The mathematics is in
docs/recurrence.md.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import typing
from itertools import compress, repeat
from operator import is_not

import torch

from fastweight import _library
from fastweight._library import DeviceError, Error
from fastweight.torch import _arguments, _autograd, _calls, _checks, _operators  # noqa: F401: the operators are registered
from fastweight.torch._serving import NotServed

__all__ = ["DeviceError", "Error", "NotServed", "Result", "backward", "forward", "nn", "ops", "plan_text", "pools", "prefill", "replay", "ring", "set_form", "speculate", "step"]

_SAVE = os.environ.get("FASTWEIGHT_SAVE", "1") != "0"
_SEGMENT = int(os.environ.get("FASTWEIGHT_SEGMENT", "0"))
_CHECKS = _checks.wanted(None)
_NUMBER = (float, int, type(None))
_form = "auto"  # of calls that name none
# Looked up once: a call takes some ten microseconds.
_untraced, _signature, _stream_of, _kept = _autograd.untraced, _calls.signature, _calls.stream_of, _calls.kept
_seen, _grad_enabled, _increment = _calls.seen, torch.is_grad_enabled, torch.autograd.graph.increment_version
_NONES = (None,) * len(_calls.INPUTS)


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name):
    if name in ("nn", "ops", "pools"):  # on first use, since they import this module
        return importlib.import_module(f"fastweight.torch.{name}")
    raise AttributeError(f"module 'fastweight.torch' has no attribute '{name}'")


class Result(typing.NamedTuple):
    """What forward() returns.

    o: [B, T, HV, V] in the dtype of q. final_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first; None unless
    output_final_state. final_precond: [N, H, K] of preconditioned rules; None for the others.

    >>> import torch
    >>> result = forward("linear_attention", *torch.ones(3, 1, 4, 1, 2), scale=1.0)
    >>> result.o[0, :, 0, 0].tolist(), result.final_state
    ([2.0, 4.0, 6.0, 8.0], None)
    """

    o: torch.Tensor
    final_state: typing.Optional[torch.Tensor]
    final_precond: typing.Optional[torch.Tensor]


def set_form(form: str) -> str:
    """Sets the form of calls that name none, also those of ops, nn, fastweight.fla and fastweight.models; returns the former.

    With "decode" the recurrences of training have the bits of step(): trainer and sampler agree in reinforcement learning.
    PyTorch's own products and norms may still round by the shape of a batch.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> beta, state, former = torch.rand(1, 6, 2), torch.zeros(1, 2, 8, 8), set_form("decode")
    >>> o = [step("deltanet", q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], state, beta=beta[:, t : t + 1]) for t in range(6)]
    >>> torch.equal(forward("deltanet", q, k, v, beta=beta).o, torch.cat(o, 1))
    True
    >>> _ = set_form(former)
    """
    global _form
    if form not in _calls.FORMS:
        raise Error(f"form: expected one of {', '.join(_calls.FORMS)}, got {form!r}")
    former, _form = _form, form
    return former


def _config(q, rule, scale, v_first, form, chunk, segment, bf16_operands, gates, max_seqlen=None):
    if not isinstance(rule, str):
        raise Error(f"rule: expected a preset's name or axis=value ..., got {type(rule).__name__}")
    if form is None:
        form = _form
    if form not in _calls.FORMS:
        raise Error(f"form: expected one of {', '.join(_calls.FORMS)}, got {form!r}")
    if bf16_operands is None:  # the chunk form on CUDA has no other; inputs of float32 there run exactly, one token at a time
        bf16_operands = q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16)
    return _calls.Config(rule, float(scale or 0.0), bool(v_first), _calls.FORMS[form], int(chunk), int(_SEGMENT if segment is None else segment),
                         bool(bf16_operands), gates or "", _bound(max_seqlen))


def _bound(max_seqlen):
    if max_seqlen is None:
        return 0
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int) or max_seqlen < 1:
        raise Error(f"max_seqlen: expected a whole number above 0 or None, got {max_seqlen!r}")
    return max_seqlen


def forward(
    rule: str,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    lambda_: torch.Tensor | None = None,
    erase_key: torch.Tensor | None = None,
    erase_write: torch.Tensor | None = None,
    erase_gate: torch.Tensor | None = None,
    write_gate: torch.Tensor | None = None,
    read_correction: torch.Tensor | None = None,
    precond_g: torch.Tensor | None = None,
    precond_beta: torch.Tensor | None = None,
    precond_center: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    initial_precond: torch.Tensor | None = None,
    a_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    precond_a_log: torch.Tensor | None = None,
    precond_dt_bias: torch.Tensor | None = None,
    *,
    gates: str | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    form: str | None = None,
    chunk: int = 0,
    segment: int | None = None,
    bf16_operands: bool | None = None,
    save: bool | None = None,
    check: bool | None = None,
    **others: torch.Tensor | None,
) -> Result:
    """Result(o, final_state, final_precond) of whole sequences; differentiable (docs/recurrence.md, sections 1 and 2).

    rule: a name ("kda"), axes ("decay=channel gain=longhorn"), or a name with axes that differ ("kda gain_bound=2").
    q, k: [B, T, H, K]; k is None for rules that take it from the decay (hgrn2). v: [B, T, HV, V].
    g, beta, ...: the other tensors of the rule. fastweight.rules.describe(rule) has their shapes. One that the rule needs
        and that is missing is an error, and so is one that it does not use.
    initial_state: [N, HV, K, V]; zero if None. initial_precond: [N, H, K]; zero if None.
    gates: which gates are given as logits and with which activation: "g=softplus beta=sigmoid",
        "g=lower_bound lower_bound=-5", "g=logsigmoid divisor=16". a_log and dt_bias belong to those. The kernels apply the
        activation in float32 and give the gradients of the logits, a_log and dt_bias. None: all are values.
    scale: of the read vector; K^-1/2 if None.
    output_final_state: whether the states after the last token are returned.
    cu_seqlens: int32 or int64 [N + 1], offsets of N sequences in a batch of one. Those on a GPU are copied to the host once
        for a tensor that does not change. cu_seqlens_cpu, the same in host memory, avoids that.
    max_seqlen: upper bound of the sequence lengths. Offsets on a GPU then stay there: nothing waits, and a captured graph
        can be replayed with other offsets. The last offset may be below T. Sequences are not cut into segments.
    state_v_first: states are [N, HV, V, K] in place of [N, HV, K, V].
    form: "auto", "token" (one token at a time in float32), "chunk", or "decode" (forward has the bits of step(), backward runs
        in chunks from its states). None: what set_form() says, "auto" at first.
    chunk: tokens of a chunk, 0: the library chooses.
    segment: CUDA: long sequences are cut into segments of so many tokens, which run in parallel. 0: the library chooses,
        -1: never; None: FASTWEIGHT_SEGMENT, else 0. The bits of a result depend on it.
    bf16_operands: whether matrix products take bfloat16 operands (sums are float32). None: on CUDA if q is bfloat16 or
        float16.
    save: whether forward keeps what backward needs. False: backward recomputes it, with the same bits, less memory and
        more time. None: True, unless FASTWEIGHT_SAVE=0.
    check: whether values are looked at first: NaN, log-decays above 0, gains beyond the rule's bound and mixed types of q,
        k and v are errors then. It waits for the device. None: False, unless FASTWEIGHT_CHECK=1. Compiled programs skip it.
    others: tensors that the C header has and that are not named above, by their names there.

    Raises fastweight.Error for wrong arguments, fastweight.DeviceError where the device cannot run the call.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8, requires_grad=True)
    >>> o, _, _ = forward("kda", q, k, v, g=-torch.rand(1, 6, 2, 8), beta=torch.rand(1, 6, 2))
    >>> dq, dk, dv = torch.autograd.grad(o.sum(), (q, k, v))
    >>> dq.shape
    torch.Size([1, 6, 2, 8])

    Two sequences of 4 and 2 tokens, packed:

    >>> offsets = torch.tensor([0, 4, 6])
    >>> packed = forward("retnet", q, k, v, cu_seqlens=offsets, output_final_state=True)
    >>> alone = forward("retnet", q[:, 4:], k[:, 4:], v[:, 4:])
    >>> packed.final_state.shape[0], torch.equal(packed.o[:, 4:], alone.o)
    (2, True)

    >>> forward("gated_deltanet", q, k, v)
    Traceback (most recent call last):
    ...
    fastweight.Error: g: expected a tensor, since the rule (...) uses it, got none
    """
    if form is None:
        form = _form
    raw = (q, k, v, g, beta, lambda_, erase_key, erase_write, erase_gate, write_gate, read_correction, precond_g, precond_beta, precond_center,
           initial_state, initial_precond, a_log, dt_bias, precond_a_log, precond_dt_bias)
    if others or _MORE:
        raw = _in_order(raw, others)
    if cu_seqlens_cpu is not None:
        cu_seqlens = cu_seqlens_cpu
    if (check or check is None and _CHECKS) and _checks.wanted(check):
        _check_values(rule, raw, gates)
    if not _untraced():
        return _traced(raw, (rule, scale, state_v_first, form, chunk, segment, bf16_operands, gates, max_seqlen), cu_seqlens, output_final_state, save)
    offsets = key = call = None
    if cu_seqlens is not None:
        _arguments.check_offsets(cu_seqlens, q)
        offsets = _calls.offsets_of(cu_seqlens, _bound(max_seqlen))
    there = tuple(map(is_not, raw, _NONES))
    present = list(compress(raw, there))
    try:
        key = (rule, scale, state_v_first, form, chunk, segment, bf16_operands, gates, max_seqlen, output_final_state, save, _grad_enabled(), there,
               offsets and offsets.key, _stream_of(q))
        call = _seen(key, present)
    except (AttributeError, TypeError):  # not tensors, or not hashable: the checks say what is wrong
        key = None
    if call is None:
        options = (rule, scale, state_v_first, form, chunk, segment, bf16_operands, gates, max_seqlen)
        call, raw = _prepared(key, options, raw, present, cu_seqlens, offsets, output_final_state, save)
        if call is None:
            return _traced(raw, options, cu_seqlens, output_final_state, save)
        present = _calls.present_of(raw)
    if call.differentiable is None:
        o, final_state, final_precond, _ = call(present)
    elif output_final_state:
        o, final_state, final_precond = call.differentiable(*present)
    else:
        o, final_state, final_precond = call.differentiable(*present), None, None
    return Result(o if o.dtype is q.dtype else o.to(q.dtype), final_state, final_precond)


def _check_values(rule, raw, gates):
    named = dict(zip(_calls.INPUTS, raw))
    _arguments.inputs_of(named)
    _checks.check_values(rule, named, gates)


def _prepared(key, options, raw, present, cu_seqlens, offsets, output_final_state, save):
    """The prepared call and the inputs as it takes them; None for a call that goes to the operator. key: None where an input may be no tensor."""
    call = whole = None
    try:
        whole = key and (key, _signature(present))
        call = _kept().get(whole)
    except AttributeError:  # not tensors: the checks say which
        key = None
    if call is None:
        inputs, config = _checked(raw, options)
        if not _autograd.eager(inputs):
            return None, raw
        grad = _grad_enabled() and any([t is not None and t.requires_grad for t in inputs])
        call = _calls.forward_call(config, inputs, offsets, bool(output_final_state), -1 if grad and (_SAVE if save is None else save) else 0, grad)
        if grad and call.differentiable is None:
            call.differentiable = _autograd.differentiable(call)
        # The same call on tensors that need no conversion is not checked again.
        if key is None or type(options[1]) not in _NUMBER or any([a is not b for a, b in zip(raw, inputs)]):
            return call, inputs
        _calls.keep(whole, call)
    _calls.see(key, present, call)
    return call, raw


# What forward names, in the order in which it does, and whether the header has more.
_NAMED = tuple(name.rstrip("_") for name, p in inspect.signature(forward).parameters.items() if p.kind == p.POSITIONAL_OR_KEYWORD)[1:]
_MORE = len(_NAMED) < len(_calls.INPUTS)


def _unexpected(name, function, unknown):
    """What is wrong with arguments that a function has not: the nearest that it has, else the tensors."""
    known = [p.rstrip("_") for p, kind in inspect.signature(function).parameters.items() if kind.kind != kind.VAR_KEYWORD]
    known += [tensor for tensor in _calls.INPUTS if tensor not in known]
    near = [match for argument in unknown for match in difflib.get_close_matches(argument, known, 1, 0.7)]
    hint = f"nearest: {', '.join(near)}" if near else f"tensors are {', '.join(_calls.INPUTS)}"
    return f"{name}: unexpected {', '.join(unknown)} ({hint}; flash-linear-attention's own arguments: fastweight.torch.ops)"


def _in_order(named, others):
    """All inputs in the header's order."""
    given = {**dict(zip(_NAMED, named)), **others}
    unknown = [name for name in given if name not in _calls.INPUTS]
    if unknown:
        raise TypeError(_unexpected("forward", forward, unknown))
    return tuple([given.get(name) for name in _calls.INPUTS])


def _checked(raw, options):
    return _arguments.inputs_of(dict(zip(_calls.INPUTS, raw))), _config(raw[0], *options)


def _traced(raw, options, cu_seqlens, output_final_state, save):
    """forward() as an operator."""
    _autograd.refuse_transforms(raw)
    inputs, config = _checked(raw, options)
    q = raw[0]
    if cu_seqlens is not None:
        _arguments.check_offsets(cu_seqlens, inputs[_calls.Q])
    save = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in inputs]) and (_SAVE if save is None else bool(save))
    o, final_state, final_precond, _ = torch.ops.fastweight.forward(*inputs, cu_seqlens, *config, output_final_state, save)
    if not output_final_state:
        final_state = final_precond = None
    elif final_precond.dim() == 1:  # the operator's absent tensor
        final_precond = None
    return Result(o if o.dtype == q.dtype else o.to(q.dtype), final_state, final_precond)


def backward(
    rule: str,
    inputs: dict[str, torch.Tensor | None],
    d_o: torch.Tensor,
    d_final_state: torch.Tensor | None = None,
    d_final_precond: torch.Tensor | None = None,
    *,
    wanted: typing.Iterable[str] | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    form: str | None = None,
    chunk: int = 0,
    segment: int | None = None,
    bf16_operands: bool | None = None,
    gates: str | None = None,
) -> dict[str, torch.Tensor]:
    """Gradients of sum(o d_o) + sum(final_state d_final_state) + sum(final_precond d_final_precond), recomputing forward.

    For programs with a backward pass of their own; under autograd call forward() and let torch differentiate.

    inputs: {name: tensor} with the names of forward's arguments.
    d_o: [B, T, HV, V]. d_final_state, d_final_precond: as forward's final states; zero if None.
    wanted: names of the gradients that are computed; all of inputs if None.
    The other arguments are as in forward(). Returns {name: gradient}, each in its input's shape and dtype.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> inputs = {"q": q, "k": k, "v": v, "beta": torch.rand(1, 6, 2)}
    >>> gradients = backward("deltanet", inputs, torch.ones_like(v), wanted=("v", "beta"))
    >>> {name: tuple(gradient.shape) for name, gradient in gradients.items()}
    {'v': (1, 6, 2, 8), 'beta': (1, 6, 2)}
    """
    named = {"lambda" if name == "lambda_" else name: tensor for name, tensor in inputs.items()}
    for name in named:
        if name not in _calls.INPUTS:
            raise Error(f"inputs: expected names of {', '.join(_calls.INPUTS)}, got '{name}'")
    names = list(inputs) if wanted is None else list(wanted)
    tensors = tuple(t if t is None else t.detach() for t in _arguments.inputs_of({**dict.fromkeys("qkv"), **named}))
    q = tensors[_calls.Q]
    config = _config(inputs["q"], rule, scale, state_v_first, form, chunk, segment, bf16_operands, gates, max_seqlen)
    _arguments.check_offsets(cu_seqlens, q)
    flags = [name in ["lambda" if n == "lambda_" else n for n in names] for name in _calls.INPUTS]
    state = _calls.state_dtype(q.dtype)
    cotangents = tuple(_autograd.usable(t, d) for t, d in ((d_o, q.dtype), (d_final_state, state), (d_final_precond, state)))
    gradients = _calls.backward(config, tensors, _calls.offsets_of(cu_seqlens, config.max_seqlen), cotangents, None, flags)
    found = dict(zip(_calls.INPUTS, gradients))
    return {name: found["lambda" if name == "lambda_" else name] for name in names}


def step(
    rule: str,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor,
    state: torch.Tensor,
    precond_state: torch.Tensor | None = None,
    *,
    slots: torch.Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    gates: str | None = None,
    check: bool | None = None,
    **tensors: torch.Tensor | None,
) -> torch.Tensor:
    """o [B, T, HV, V] of one or a few tokens a sequence; the states are updated in place. No gradients.

    state: [N, HV, K, V] (state_v_first: [N, HV, V, K]), float32 or bfloat16, or float64 in a call of float64.
    precond_state: [N, H, K] of preconditioned rules, float32 (float64).
    slots: int32 [N] on the device of q: state and precond_state are pools [slots, ...], and sequence n has its state at
        slots[n]. A sequence with a negative slot is skipped, and its o is not written.
    tensors: the other tensors of the rule, by forward's names. The other arguments are as in forward().

    Raises fastweight.Error where a tensor requires gradients: forward(form="token") has them.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> beta = torch.rand(1, 6, 2)
    >>> whole = forward("deltanet", q, k, v, beta=beta, form="token").o
    >>> state = torch.zeros(1, 2, 8, 8)
    >>> tokens = [slice(t, t + 1) for t in range(6)]
    >>> o = [step("deltanet", q[:, t], k[:, t], v[:, t], state, beta=beta[:, t]) for t in tokens]
    >>> torch.allclose(torch.cat(o, 1), whole, atol=1e-5)
    True
    """
    if (check or check is None and _CHECKS) and _checks.wanted(check):
        given = {"q": q, "k": k, "v": v, **{name.rstrip("_"): t for name, t in tensors.items()}}
        _check_values(rule, [given.get(name) for name in _calls.INPUTS], gates)
    eager = _untraced()
    key = whole = call = offsets = None
    if eager:
        if cu_seqlens is not None:
            _arguments.check_offsets(cu_seqlens, q)
            offsets = _calls.offsets_of(cu_seqlens, _bound(max_seqlen))
        raw = (q, k, v, state, precond_state, slots, *tensors.values())
        present = [t for t in raw if t is not None]
        try:
            key = (rule, scale, state_v_first, gates, max_seqlen, _grad_enabled(), *tensors, tuple(map(is_not, raw, repeat(None))), offsets and offsets.key,
                   slots if slots is None else slots.data_ptr(), _stream_of(q))
            call = _seen(key, present)
            if call is None:
                whole = (key, _signature(present))
                call = _kept().get(whole)
                if call is not None:
                    _calls.see(key, present, call)
        except (AttributeError, TypeError):
            whole = None
    if call is None:
        inputs, config = _checked_step(rule, q, k, v, state, precond_state, slots, scale, state_v_first, gates, max_seqlen, tensors)
        if cu_seqlens is not None:
            _arguments.check_offsets(cu_seqlens, inputs[_calls.Q])
        if not (eager and _autograd.eager((*inputs, state, precond_state, slots))):
            _autograd.refuse_transforms(inputs)
            o = torch.ops.fastweight.step_(*inputs, cu_seqlens, *config, state, precond_state, slots)
            return o if o.dtype == q.dtype else o.to(q.dtype)
        given = {"q": q, "k": k, "v": v, **{name.rstrip("_"): t for name, t in tensors.items()}}
        unchanged = all([t is given.get(name) for name, t in zip(_calls.INPUTS, inputs)])
        inputs = list(inputs)
        inputs[_calls.INITIAL_STATE], inputs[_calls.INITIAL_PRECOND] = state, precond_state
        call = _calls.step_call(config, inputs, offsets, slots)
        if whole is not None and type(scale) in _NUMBER and unchanged:
            names = {name.rstrip("_"): name for name in tensors}
            before, after = ([names[n] for n in part if n in names] for part in (_calls.INPUTS[: _calls.INITIAL_STATE], _calls.INPUTS[_calls.INITIAL_STATE :]))
            _calls.keep(whole, (call, before, after))
        states = _calls.present_of((state, precond_state))
        o = call(_calls.present_of(inputs), states)
    else:
        call, before, after = call
        states = [state] if precond_state is None else [state, precond_state]
        o = call(([q, v] if k is None else [q, k, v]) + [tensors[n] for n in before] + states + [tensors[n] for n in after], states)
    for tensor in states:
        if not tensor.is_inference():
            _increment(tensor)
    return o if o.dtype is q.dtype else o.to(q.dtype)


def speculate(
    rule: str,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor,
    state: torch.Tensor,
    token_slots: torch.Tensor,
    precond_state: torch.Tensor | None = None,
    *,
    accepted: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    token_states: torch.Tensor | None = None,
    token_preconds: torch.Tensor | None = None,
    first_slot: int = 0,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    gates: str | None = None,
    **tensors: torch.Tensor | None,
) -> torch.Tensor:
    """o [B, T, HV, V] of drafted tokens, which may be rejected later. No gradients; not under torch.compile.

    state: pool [slots, HV, K, V] (precond_state: [slots, H, K]).
    token_slots: contiguous int32 [N, columns]. The state after token t of sequence n goes to slot token_slots[n, t] of
        token_states (token_preconds), or of the same pool if they are None. A sequence has at most `columns` tokens.
    accepted: int32 [N], how many tokens of the previous call were accepted. The sequence starts from slot
        token_slots[n, accepted[n] - 1].
    slots: int32 [N]: it starts from slot slots[n] instead. Without both it starts from state n, and the pool has N states.
    first_slot: smaller slots mean "none": such a sequence is skipped, and its o is zero.
    The other arguments are as in step().

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 3, 2, 8)
    >>> beta, pool = torch.rand(1, 3, 2), torch.zeros(4, 2, 8, 8)
    >>> slots = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    >>> start, one = torch.tensor([[0], [1]], dtype=torch.int32)
    >>> drafted = speculate("deltanet", q, k, v, pool, slots, slots=start, beta=beta)  # the states of 3 tokens are kept
    >>> # The first of the three was accepted: the next call starts from its state.
    >>> again = speculate("deltanet", q[:, 1:], k[:, 1:], v[:, 1:], pool, slots, accepted=one, beta=beta[:, 1:])
    >>> torch.equal(again, drafted[:, 1:])
    True
    """
    if not _autograd.untraced():
        raise Error("speculate: expected a call that is not compiled or traced")
    config = _config(q, rule, scale, state_v_first, "token", 0, None, False, gates, max_seqlen)
    inputs = _checked_states("speculate", q, k, v, state, precond_state, slots, tensors)
    finals = (state if token_states is None else token_states, precond_state if token_preconds is None else token_preconds)
    _check_states(inputs, q, zip(("token_states", "token_preconds"), finals))
    _check_numbers(q, cu_seqlens, token_slots=(token_slots, 2), accepted=(accepted, 1), slots=(slots, 1))
    places = _calls.Slots(slots, token_slots, accepted, None, finals[0].shape[0], first_slot, True)
    return _at_slots(config, inputs, q, state, precond_state, cu_seqlens, places, finals, _calls.Step)


def ring(rule: str, state: torch.Tensor, *, tokens: int = 16, most_tokens: int = 1, takes_back: bool = False, state_v_first: bool = False) -> torch.Tensor:
    """The ring of replay() for states of this shape: [N or slots, HV, rows, numbers of a token], its rows at multiples of four numbers.

    tokens, most_tokens: as replay()'s `tokens`, and the most tokens of a sequence in one call. takes_back: `previous` will be given.

    >>> import torch
    >>> ring("deltanet", torch.zeros(3, 2, 8, 16), tokens=4).shape
    torch.Size([3, 2, 4, 24])
    """
    if state.dim() != 4:
        raise Error(f"state: expected four dimensions, got shape {list(state.shape)}")
    if not 1 <= most_tokens <= tokens <= 64:
        raise Error(f"tokens: expected 1 to 64, and most_tokens 1 to tokens, got {tokens} and {most_tokens}")
    decay, (K, V) = _library.rule_struct(rule).decay, reversed(state.shape[2:]) if state_v_first else state.shape[2:]
    kinds = _library.header().enums["fw_decay"]
    numbers = K + V + (K if decay == kinds["channel"] else 1 if decay == kinds["scalar"] else 0)
    rows = tokens - 1 + (2 if takes_back else 1) * most_tokens
    padded = -(-numbers // 4) * 4
    return torch.zeros(*state.shape[:2], rows, padded, dtype=_calls.state_dtype(state.dtype), device=state.device)[..., :numbers]


def replay(
    rule: str,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor,
    state: torch.Tensor,
    ring: torch.Tensor,
    positions: torch.Tensor,
    precond_state: torch.Tensor | None = None,
    *,
    tokens: int = 16,
    previous: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    first_slot: int = 0,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    gates: str | None = None,
    **tensors: torch.Tensor | None,
) -> torch.Tensor:
    """o [B, T, HV, V] as step() has it, without writing the states of most tokens: for decoding many sequences. No gradients.

    A token is written to the ring alone. After `tokens` tokens (1 to 64, the same number in all calls) all of them are folded into the state.
    ring: as ring() makes it, [N or slots, HV, rows, numbers], updated in place.
    positions: int32 [N]: how many tokens replay() has given the sequence since its state was written by others. The caller counts, on
        the device; prefill() with the ring folds what is in it, and positions begin at 0 again.
    previous: int32 [N]: the positions of the previous call, whose tokens may then be taken back: the call starts at any position from
        previous[n] on. Not with a preconditioner.
    first_slot: smaller slots mean "none": such a sequence is skipped, and its o is zero.
    The other arguments are as in step().

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> beta = torch.rand(1, 6, 2)
    >>> state, position = torch.zeros(1, 2, 8, 8), torch.zeros(1, dtype=torch.int32)
    >>> tail = ring("deltanet", state, tokens=4)
    >>> o = []
    >>> for t in range(6):
    ...     now = slice(t, t + 1)
    ...     o.append(replay("deltanet", q[:, now], k[:, now], v[:, now], state, tail, position, tokens=4, beta=beta[:, now]))
    ...     position += 1
    >>> torch.allclose(torch.cat(o, 1), forward("deltanet", q, k, v, beta=beta, form="token").o, atol=1e-5)
    True
    """
    if not _autograd.untraced():
        raise Error("replay: expected a call that is not compiled or traced")
    config = _config(q, rule, scale, state_v_first, "token", 0, None, False, gates, max_seqlen)
    inputs = _checked_states("replay", q, k, v, state, precond_state, slots, tensors)
    places = _calls.Slots(slots, first=first_slot, clears=True, ring=_ring_of(q, cu_seqlens, ring, tokens, positions, previous))
    _check_numbers(q, cu_seqlens, slots=(slots, 1))
    return _at_slots(config, inputs, q, state, precond_state, cu_seqlens, places, (state, precond_state, None, None, ring), _calls.Step)


def _ring_of(q, cu_seqlens, ring, tokens, positions, previous):
    if not isinstance(ring, torch.Tensor) or ring.dim() != 4 or ring.device != q.device or ring.dtype != _calls.state_dtype(q.dtype):
        found = f"{ring.dtype} of shape {list(ring.shape)} on {ring.device}" if isinstance(ring, torch.Tensor) else type(ring).__name__
        raise Error(f"ring: expected {_calls.state_dtype(q.dtype)} of four dimensions on {q.device}, as ring() makes it, got {found}")
    if positions is None:
        raise Error("positions: expected int32 positions with a ring, got none")
    _check_numbers(q, cu_seqlens, positions=(positions, 1), previous=(previous, 1))
    return _calls.Ring(tokens, ring.shape[2], positions, previous)


def prefill(
    rule: str,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    precond_state: torch.Tensor | None = None,
    *,
    final_slots: torch.Tensor | None = None,
    update: bool = True,
    first_slot: int = 0,
    checkpoint_interval: int = 0,
    checkpoint_slots: torch.Tensor | None = None,
    checkpoint_states: torch.Tensor | None = None,
    checkpoint_preconds: torch.Tensor | None = None,
    ring: torch.Tensor | None = None,
    ring_tokens: int = 16,
    positions: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    form: str | None = None,
    chunk: int = 0,
    segment: int | None = None,
    bf16_operands: bool | None = None,
    gates: str | None = None,
    **tensors: torch.Tensor | None,
) -> torch.Tensor:
    """o [B, T, HV, V] of sequences whose states lie in a pool. No gradients; not under torch.compile.

    state: pool [slots, HV, K, V] (precond_state: [slots, H, K]), read and written in place.
    slots: int32 [N]: sequence n starts from slot slots[n], or from zero if that is below first_slot.
    final_slots: int32 [N]: where the final states go; None: to `slots`. Below first_slot, and with update=False: nowhere.
    checkpoint_interval, checkpoint_slots: tokens (a multiple of 64) and contiguous int32 [N, columns]. The state after the
        first (i + 1) * checkpoint_interval tokens of sequence n is copied to slot checkpoint_slots[n, i] of
        checkpoint_states (checkpoint_preconds), or of the same pool if they are None: for a prefix cache.
    ring, ring_tokens, positions, previous: as replay()'s ring, tokens, positions and previous. What is in the ring is first
        folded into the states where the sequences start, in place; positions are 0 after the call.
    The other arguments are as in forward().

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> beta, pool = torch.rand(1, 6, 2), torch.zeros(4, 2, 8, 8)
    >>> o = prefill("deltanet", q, k, v, pool, torch.tensor([2], dtype=torch.int32), beta=beta)
    >>> bool(pool[2].any()), bool(pool[[0, 1, 3]].any())
    (True, False)
    """
    if not _autograd.untraced():
        raise Error("prefill: expected a call that is not compiled or traced")
    config = _config(q, rule, scale, state_v_first, form, chunk, segment, bf16_operands, gates, max_seqlen)
    inputs = _checked_states("prefill", q, k, v, state, precond_state, slots, tensors)
    if bool(checkpoint_interval) != (checkpoint_slots is not None):
        raise Error("checkpoint_interval: expected a number together with checkpoint_slots, got one of the two")
    _check_numbers(q, cu_seqlens, slots=(slots, 1), final_slots=(final_slots, 1), checkpoint_slots=(checkpoint_slots, 2))
    finals, kept = (state, precond_state) if update else (None, None), (None, None)
    if checkpoint_slots is not None:
        kept = (state if checkpoint_states is None else checkpoint_states, precond_state if checkpoint_preconds is None else checkpoint_preconds)
        _check_states(inputs, q, zip(("checkpoint_states", "checkpoint_preconds"), kept))
    places = _calls.Slots(slots, finals=final_slots, first=first_slot, checkpoints=checkpoint_slots, interval=checkpoint_interval,
                          checkpoint_states=0 if kept[0] is None else kept[0].shape[0],
                          ring=None if ring is None else _ring_of(q, cu_seqlens, ring, ring_tokens, positions, previous))
    return _at_slots(config, inputs, q, state, precond_state, cu_seqlens, places, (*finals, *kept, ring), _calls.Prefill)


def _check_numbers(q, cu_seqlens, **named):
    _arguments.check_offsets(cu_seqlens, q)
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for name, (numbers, rank) in named.items():
        if numbers is None:
            continue
        if not isinstance(numbers, torch.Tensor):
            raise Error(f"{name}: expected a torch.Tensor of int32, got {type(numbers).__name__}")
        if not (numbers.dtype == torch.int32 and numbers.dim() == rank and numbers.device == q.device and numbers.is_contiguous()):
            raise Error(f"{name}: expected contiguous int32 of {rank} dimensions on {q.device}, got {numbers.dtype} of shape {list(numbers.shape)} on {numbers.device}")
        if numbers.shape[0] != count:
            raise Error(f"{name}: expected {count} rows, one a sequence, got shape {list(numbers.shape)}")


def _at_slots(config, inputs, q, state, precond_state, cu_seqlens, places, finals, kind):
    inputs = list(inputs)
    inputs[_calls.INITIAL_STATE], inputs[_calls.INITIAL_PRECOND] = state, precond_state
    call = _calls.step_call(config, inputs, _calls.offsets_of(cu_seqlens, config.max_seqlen), places, finals, kind)
    o = call(_calls.present_of(inputs), _calls.present_of(finals))
    for tensor in _calls.present_of(finals):
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    return o if o.dtype == q.dtype else o.to(q.dtype)


def _checked_step(rule, q, k, v, state, precond_state, slots, scale, state_v_first, gates, max_seqlen, tensors):
    inputs = _checked_states("step", q, k, v, state, precond_state, slots, tensors)
    return inputs, _config(q, rule, scale, state_v_first, "token", 0, None, False, gates, max_seqlen)


def _checked_states(function, q, k, v, state, precond_state, slots, tensors):
    for name in tensors:
        if name.rstrip("_") not in _calls.INPUTS or name.startswith("initial"):
            raise Error(f"{function}: expected tensors of {', '.join(n for n in _calls.INPUTS[3:] if not n.startswith('initial'))}, got '{name}'")
    inputs = _arguments.inputs_of({"q": q, "k": k, "v": v, **{name.rstrip("_"): t for name, t in tensors.items()}})
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        raise Error(f"{function}: expected tensors without gradients (torch.no_grad()), got one that requires them; forward(form='token') has gradients")
    if not isinstance(state, torch.Tensor):
        raise Error(f"state: expected a torch.Tensor, got {type(state).__name__}")
    if slots is not None and not isinstance(slots, torch.Tensor):
        raise Error(f"slots: expected a torch.Tensor of int32, got {type(slots).__name__}")
    if slots is not None and (slots.dtype != torch.int32 or slots.dim() != 1 or slots.device != q.device):
        raise Error(f"slots: expected int32 of one dimension on {q.device}, got {slots.dtype} of shape {list(slots.shape)} on {slots.device}")
    _check_states(inputs, q, (("state", state), ("precond_state", precond_state)))
    return inputs


def _check_states(inputs, q, named):
    for name, tensor in named:
        if tensor is not None and tensor.device != q.device:
            raise Error(f"{name}: expected a tensor on {q.device}, as q is, got one on {tensor.device}")
        own = _calls.state_dtype(inputs[_calls.Q].dtype)
        allowed = (own, torch.bfloat16) if own == torch.float32 and name in ("state", "token_states", "checkpoint_states") else (own,)
        if tensor is not None and tensor.dtype not in allowed:
            raise Error(f"{name}: expected {' or '.join(map(str, allowed))} (it is updated in place), got {tensor.dtype}")


def plan_text(
    rule: str,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    form: str | None = None,
    chunk: int = 0,
    segment: int | None = None,
    bf16_operands: bool | None = None,
    gates: str | None = None,
    **tensors: torch.Tensor | None,
) -> str:
    """What forward() would run on tensors like these, as text: the form, the kernels, the bytes of workspace.

    Computes nothing. The arguments are as in forward().

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> print(plan_text("deltanet", q, k, v, beta=torch.rand(1, 6, 2)).splitlines()[1])
    sequences: 1 of at most 6 tokens, 6 in all
    """
    named = {"q": q, "k": k, "v": v, **{name.rstrip("_"): t for name, t in tensors.items()}}
    unknown = [name for name in named if name not in _calls.INPUTS]
    if unknown:
        raise TypeError(_unexpected("plan_text", plan_text, unknown))
    inputs = _arguments.inputs_of(named)
    config = _config(q, rule, scale, state_v_first, form, chunk, segment, bf16_operands, gates, max_seqlen)
    return _calls.plan_text(config, inputs, _calls.offsets_of(cu_seqlens, config.max_seqlen))
