"""Autograd of eager calls: a Function around the calls of _calls.py.

What is traced or compiled goes through the operators instead, whose backward pass is registered (_operators.py).
"""

import torch

from fastweight.torch import _calls, _operators
from fastweight.torch._calls import Q

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def untraced():
    """Whether nothing compiles, traces or watches."""
    return not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None)


def eager(inputs):
    """Whether the call may go past the dispatcher: untraced, and every tensor has memory of its own."""
    return untraced() and all(t is None or type(t) in _PLAIN for t in inputs)


class _NoSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        return _operators._no_second(ctx)


class Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, config, offsets, final, save, key, *inputs):
        out = _calls.forward(config, inputs, offsets, final, -1 if save else 0, key)
        ctx.save_for_backward(*inputs, out.saved)
        ctx.call = (config, offsets, key)
        ctx.set_materialize_grads(False)
        return out[:3]

    @staticmethod
    def backward(ctx, d_o, d_state, d_precond):
        *inputs, saved = ctx.saved_tensors  # plain tensors
        wanted = ctx.needs_input_grad[5:]
        dtype = inputs[Q].dtype
        state_dtype = _calls.state_dtype(dtype)
        usable = _operators.usable
        cotangents = (usable(d_o, dtype), usable(d_state, state_dtype), usable(d_precond, state_dtype))
        config, offsets, key = ctx.call
        gradients = _calls.backward(config, inputs, offsets, cotangents, saved, wanted, key)
        if torch.is_grad_enabled():  # create_graph: a derivative of these must not be taken for zero
            present = [g for g in gradients if g is not None]
            watched = [t for t in (*inputs, *cotangents) if t is not None]
            found = iter(_NoSecond.apply(len(present), *present, *watched))
            gradients = [None if g is None else next(found) for g in gradients]
        return (None, None, None, None, None, *gradients)
