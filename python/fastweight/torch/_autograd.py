"""Autograd of eager calls: a Function around the prepared calls of _calls.py.

What is traced or compiled goes through the operators instead, whose backward pass is registered (_operators.py).
"""

import torch

from fastweight.torch import _calls

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def untraced():
    """Whether nothing compiles, traces or watches."""
    return not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None)


def eager(inputs):
    """Whether the call may go past the dispatcher: untraced, and every tensor has memory of its own."""
    return untraced() and all(t is None or type(t) in _PLAIN for t in inputs)


def no_second(ctx, *_):
    raise RuntimeError("fastweight: second derivatives are not computed (backward with create_graph=True and a derivative of its result)")


def usable(cotangent, like_dtype):
    """A cotangent as the library takes it: of a type of the call, its last dimension contiguous."""
    if cotangent is None:
        return None
    if cotangent.dtype is not like_dtype:
        cotangent = cotangent.to(like_dtype)
    return cotangent if cotangent.stride(-1) == 1 else cotangent.contiguous()


class _NoSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(t.view_as(t) for t in tensors[:count])

    backward = staticmethod(no_second)


def _gradients(call, tensors, cotangents, saved, wanted):
    stream = _calls.stream_of(tensors[0])
    d_o, d_state, d_precond = cotangents
    key = (call, wanted, stream, saved is None, d_o if d_o is None else d_o.stride(), d_state if d_state is None else d_state.stride(),
           d_precond if d_precond is None else d_precond.stride())
    prepared = _calls.kept().get(key)
    if prepared is None:
        inputs, all_wanted = [None] * call.input_count, [False] * call.input_count
        for place, tensor, want in zip(call.places, tensors, wanted):
            inputs[place], all_wanted[place] = tensor, want
        plan = call.plan if stream == call.stream and not call.plan.outgrown() else None
        prepared = _calls.keep(key, _calls.Backward(call.config, inputs, call.offsets, cotangents, all_wanted, saved is not None, stream, plan))
    return prepared(tensors, (d_o,) if d_state is None and d_precond is None and d_o is not None else [d for d in cotangents if d is not None], saved)


class Recurrence(torch.autograd.Function):
    """call: a Forward; tensors: its present inputs."""

    @staticmethod
    def forward(ctx, call, *tensors):
        o, state, precond, saved = call(tensors)
        ctx.save_for_backward(*tensors, saved)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return o if state is None else (o, state, precond)

    @staticmethod
    def backward(ctx, d_o, d_state=None, d_precond=None):
        *tensors, saved = ctx.saved_tensors  # plain tensors
        call = ctx.call
        cotangents = (usable(d_o, call.dtype), usable(d_state, call.state_dtype), usable(d_precond, call.state_dtype))
        gradients = _gradients(call, tensors, cotangents, saved, ctx.needs_input_grad[1:])
        if torch.is_grad_enabled():  # create_graph: a derivative of these must not be taken for zero
            present = [g for g in gradients if g is not None]
            watched = [t for t in (*tensors, *cotangents) if t is not None]
            found = iter(_NoSecond.apply(len(present), *present, *watched))
            gradients = [None if g is None else next(found) for g in gradients]
        return (None, *gradients)
