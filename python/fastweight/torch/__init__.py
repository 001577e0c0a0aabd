"""The recurrence on tensors: forward (differentiable), backward, step, plan_text.

    from fastweight.torch import forward
    o, final_state, _ = forward("gated_deltanet", q, k, v, g=g, beta=beta, output_final_state=True)

q, k [B, T, H, K] (k None for hgrn2, which makes it of its decay), v [B, T, HV, V]; which other tensors a rule takes, and their shapes, is said by `fastweight rules NAME` and by the
message when one is missing. Types: float32 and bfloat16 or float16 (each tensor on its own), float64 on the CPU; states float32 (float64).
Gradients have their inputs' types. Packed sequences: B = 1 and cu_seqlens.

torch.compile takes these calls into its graph (fullgraph=True). Second derivatives are refused.
"""

import inspect
import os
import typing
from itertools import compress, repeat
from operator import is_not

import torch

from fastweight._library import DeviceError, Error
from fastweight.torch import _arguments, _autograd, _calls, _operators  # noqa: F401: the operators are registered

__all__ = ["DeviceError", "Error", "Result", "backward", "forward", "plan_text", "prefill", "speculate", "step"]

_SAVE = os.environ.get("FASTWEIGHT_SAVE", "1") != "0"
_SEGMENT = int(os.environ.get("FASTWEIGHT_SEGMENT", "0"))
_NUMBER = (float, int, type(None))
# Looked up once: a call is some ten microseconds.
_untraced, _signature, _stream_of, _kept = _autograd.untraced, _calls.signature, _calls.stream_of, _calls.kept
_seen, _grad_enabled, _increment = _calls.seen, torch.is_grad_enabled, torch.autograd.graph.increment_version
_NONES = (None,) * len(_calls.INPUTS)


class Result(typing.NamedTuple):
    o: torch.Tensor
    final_state: typing.Optional[torch.Tensor]
    final_precond: typing.Optional[torch.Tensor]


def _config(q, rule, scale, v_first, form, chunk, segment, bf16_operands, gates, max_seqlen=None):
    if not isinstance(rule, str):
        raise Error(f"rule: expected a preset's name or axis=value ..., got {type(rule).__name__}")
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
    rule,
    q,
    k,
    v,
    g=None,
    beta=None,
    lambda_=None,
    erase_key=None,
    erase_gate=None,
    write_gate=None,
    read_correction=None,
    precond_g=None,
    precond_beta=None,
    precond_center=None,
    initial_state=None,
    initial_precond=None,
    a_log=None,
    dt_bias=None,
    precond_a_log=None,
    precond_dt_bias=None,
    erase_write=None,
    *,
    gates=None,
    scale=None,
    output_final_state=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    max_seqlen=None,
    state_v_first=False,
    form="auto",
    chunk=0,
    segment=None,
    bf16_operands=None,
    save=None,
    **others,
):
    """Result(o, final_state, final_precond); o [B, T, HV, V] in q's type.

    rule: a preset's name, "axis=value ..." or a name with axes that differ ("kda gain_bound=2").
    gates: which gates are given as logits and how (fw_gates): "g=softplus beta=sigmoid", "g=lower_bound lower_bound=-5"; a_log and dt_bias belong to those.
    scale: of the read vector, K^-1/2 if None. state_v_first: states are [N, HV, V, K] instead of [N, HV, K, V].
    cu_seqlens: offsets [N + 1] of sequences in a batch of one; on a device its values are fetched once for a tensor that does not change, and
        cu_seqlens_cpu, the same in host memory, spares that.
    max_seqlen: no sequence is longer. Offsets on a device are then read there alone, also when a captured graph is replayed with others; the last may be below T.
        Sequences are not cut into segments then, and what is kept for backward has room for the most chunks that there may be.
    form, chunk, segment, bf16_operands: as in fw_desc; None: by environment (FASTWEIGHT_SEGMENT) and device.
    others: inputs that the header has and that are not named above, by their names there.
    save: whether forward keeps what backward needs (True unless FASTWEIGHT_SAVE=0) or backward computes it again: less memory, more time.
    """
    raw = (q, k, v, g, beta, lambda_, erase_key, erase_gate, write_gate, read_correction, precond_g, precond_beta, precond_center, initial_state,
           initial_precond, a_log, dt_bias, precond_a_log, precond_dt_bias, erase_write)
    if others or _MORE:
        raw = _in_order(raw, others)
    if cu_seqlens_cpu is not None:
        cu_seqlens = cu_seqlens_cpu
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


def _prepared(key, options, raw, present, cu_seqlens, offsets, output_final_state, save):
    """The prepared call, and the inputs as it takes them; None for a call that goes to the operator. key None: of something that is no tensor, perhaps."""
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


def _in_order(named, others):
    """All inputs in the header's order."""
    given = {**dict(zip(_NAMED, named)), **others}
    unknown = [name for name in given if name not in _calls.INPUTS]
    if unknown:
        raise TypeError(f"forward: expected tensors of {', '.join(_calls.INPUTS)}, got {', '.join(unknown)}")
    return tuple([given.get(name) for name in _calls.INPUTS])


def _checked(raw, options):
    return _arguments.inputs_of(dict(zip(_calls.INPUTS, raw))), _config(raw[0], *options)


def _traced(raw, options, cu_seqlens, output_final_state, save):
    """forward() as an operator."""
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


def backward(rule, inputs, d_o, d_final_state=None, d_final_precond=None, *, wanted=None, scale=None, cu_seqlens=None, max_seqlen=None, state_v_first=False,
             form="auto", chunk=0, segment=None, bf16_operands=None, gates=None):
    """Gradients of sum(o d_o) + sum(final_state d_final_state) + sum(final_precond d_final_precond) as {name: tensor}, recomputing forward.

    inputs: {name: tensor} with the names of forward's arguments; wanted: names, all of inputs if None. For programs with a backward pass of their own;
    under autograd call forward and let torch differentiate."""
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


def step(rule, q, k, v, state, precond_state=None, *, slots=None, scale=None, cu_seqlens=None, max_seqlen=None, state_v_first=False, gates=None, **tensors):
    """o of one or a few tokens a sequence; state [N, HV, K, V] (and precond_state [N, H, K]) are updated in place. No gradients.

    slots: int32 [N], the states of sequence n lie at slots[n] of a pool; below 0: the sequence is skipped and its o is not written."""
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


def speculate(rule, q, k, v, state, token_slots, precond_state=None, *, accepted=None, slots=None, token_states=None, token_preconds=None, first_slot=0,
              scale=None, cu_seqlens=None, max_seqlen=None, state_v_first=False, gates=None, **tensors):
    """o of a few tokens a sequence that may be taken back. No gradients; not for programs that are compiled.

    state is a pool [slots, HV, K, V] (precond_state [slots, H, K]). The states after token t of sequence n go to slot token_slots[n, t] (int32 [N, columns]) of
    token_states and token_preconds, or of the same pool. The sequence starts from slot token_slots[n, accepted[n] - 1] (accepted: int32 [N], how many
    tokens of the call before stay), or slots[n], or n. Slots below first_slot are none: a sequence without one is skipped, its o zero."""
    if not _autograd.untraced():
        raise Error("speculate: expected a call that is not compiled or traced")
    config = _config(q, rule, scale, state_v_first, "token", 0, None, False, gates, max_seqlen)
    inputs = _checked_states("speculate", q, k, v, state, precond_state, slots, tensors)
    finals = (state if token_states is None else token_states, precond_state if token_preconds is None else token_preconds)
    _check_states(inputs, q, zip(("token_states", "token_preconds"), finals))
    _check_numbers(q, cu_seqlens, token_slots=(token_slots, 2), accepted=(accepted, 1), slots=(slots, 1))
    places = _calls.Slots(slots, token_slots, accepted, None, finals[0].shape[0], first_slot, True)
    return _at_slots(config, inputs, q, state, precond_state, cu_seqlens, places, finals, _calls.Step)


def prefill(rule, q, k, v, state, slots, precond_state=None, *, final_slots=None, update=True, first_slot=0, checkpoint_interval=0, checkpoint_slots=None,
            checkpoint_states=None, checkpoint_preconds=None, scale=None, cu_seqlens=None, max_seqlen=None, state_v_first=False, form="auto", chunk=0,
            segment=None, bf16_operands=None, gates=None, **tensors):
    """o of sequences whose states lie in a pool [slots, HV, K, V] (precond_state [slots, H, K]). No gradients; not for programs that are compiled.

    Sequence n starts from slot slots[n] (int32 [N]), or from zero if that is below first_slot; its final state goes to the same slot, or to final_slots[n], or
    nowhere: below first_slot, and where update is False.
    checkpoint_interval (a multiple of 64) and checkpoint_slots (int32 [N, columns]): the state after the first (i + 1) checkpoint_interval tokens of sequence n is
    copied to slot checkpoint_slots[n, i] of checkpoint_states (and checkpoint_preconds), or of the same pool, for a cache of prefixes."""
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
                          checkpoint_states=0 if kept[0] is None else kept[0].shape[0])
    return _at_slots(config, inputs, q, state, precond_state, cu_seqlens, places, (*finals, *kept), _calls.Prefill)


def _check_numbers(q, cu_seqlens, **named):
    _arguments.check_offsets(cu_seqlens, q)
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for name, (numbers, rank) in named.items():
        if numbers is None:
            continue
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


def plan_text(rule, q, k, v, *, scale=None, cu_seqlens=None, max_seqlen=None, state_v_first=False, form="auto", chunk=0, segment=None, bf16_operands=None,
              gates=None, **tensors):
    """What a call with these tensors would do: form, kernels, bytes."""
    inputs = _arguments.inputs_of({"q": q, "k": k, "v": v, **{name.rstrip("_"): t for name, t in tensors.items()}})
    config = _config(q, rule, scale, state_v_first, form, chunk, segment, bf16_operands, gates, max_seqlen)
    return _calls.plan_text(config, inputs, _calls.offsets_of(cu_seqlens, config.max_seqlen))
