"""Autograd of eager calls: Functions around the prepared calls of _calls.py.

What is traced or compiled goes through the operators instead, whose backward pass is registered (_operators.py).
"""

import torch
from torch.autograd import forward_ad

from fastweight.torch import _calls

_PLAIN = (torch.Tensor, torch.nn.Parameter)


_grad_enabled = torch.is_grad_enabled
_compiling, _modes, _transforms = torch.compiler.is_compiling, torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack


def untraced():
    """Whether nothing compiles, traces or watches."""
    return not (_compiling() or _modes() > 0 or _transforms() is not None or forward_ad._current_level >= 0)


def refuse_transforms(tensors):
    """Raises for tensors that forward mode or torch.func differentiates: operators of torch.library have neither, and a tangent would be lost."""
    if _compiling() or (_transforms() is None and forward_ad._current_level < 0):
        return
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError("fastweight: derivatives in forward mode are not computed (torch.func.jvp, torch.func.jacfwd, torch.autograd.forward_ad)")
    if any(torch._C._functorch.is_gradtrackingtensor(t) for t in tensors):
        raise RuntimeError("fastweight: torch.func.grad, vjp and jacrev are not supported; torch.autograd.grad and backward() are")


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


def _prepared(call, tensors, cotangents, saved, wanted, stream):
    """wanted: of the present tensors."""
    inputs, all_wanted = [None] * call.input_count, [False] * call.input_count
    for place, tensor, want in zip(call.places, tensors, wanted):
        inputs[place], all_wanted[place] = tensor, want
    plan = call.plan if stream == call.stream and not call.plan.outgrown() else None
    return _calls.Backward(call.config, inputs, call.offsets, cotangents, all_wanted, saved is not None, stream, plan)


def _backward(ctx, call, d_o, d_state, d_precond):
    *tensors, saved = ctx.saved_tensors  # plain tensors
    if d_state is None and d_precond is None and d_o is not None:  # the usual case, whose key is the shortest
        d_o = usable(d_o, call.dtype)
        cotangents, given, strides = (d_o, None, None), (d_o,), d_o.stride()
    else:
        cotangents = (usable(d_o, call.dtype), usable(d_state, call.state_dtype), usable(d_precond, call.state_dtype))
        given = [d for d in cotangents if d is not None]
        strides = tuple([None if d is None else d.stride() for d in cotangents])
    wanted, stream, kept = ctx.needs_input_grad, _calls.stream_of(tensors[0]), _calls.kept()
    key = (call, wanted, strides, stream)
    prepared = kept.get(key)
    if prepared is None:
        prepared = _calls.keep(key, _prepared(call, tensors, cotangents, saved, wanted, stream))
    gradients = prepared(tensors, given, saved)
    if _grad_enabled():  # create_graph: a derivative of these must not be taken for zero
        present = [g for g in gradients if g is not None]
        watched = [t for t in (*tensors, *cotangents) if t is not None]
        found = iter(_NoSecond.apply(len(present), *present, *watched))
        gradients = [None if g is None else next(found) for g in gradients]
    return tuple(gradients)


def differentiable(call):
    """A differentiable function of the call's present inputs; returns o, or (o, final_state, final_precond).

    Every prepared call has a Function class of its own: passing the call as an argument costs time in every call, a class
    costs it once."""

    class Recurrence(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            o, state, precond, saved = call(tensors)
            ctx.save_for_backward(*tensors, saved)
            if state is None:
                return o
            ctx.set_materialize_grads(False)
            return o, state, precond

        @staticmethod
        def backward(ctx, d_o, d_state=None, d_precond=None):
            return _backward(ctx, call, d_o, d_state, d_precond)

    return Recurrence.apply
