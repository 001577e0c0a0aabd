"""The operators fastweight::forward, backward and step_ of torch.library: what a compiled or traced program calls.

Their arguments are the inputs in the order of the C header, then the offsets, then the options. An absent output is a tensor without elements,
since an operator returns tensors. Autograd is registered for them; eager code goes past them (_autograd.py), because the dispatcher costs more than a call.
"""

import torch

from fastweight.torch import _calls
from fastweight.torch._autograd import no_second, usable
from fastweight.torch._plans import Config, INPUTS, Q, V

_COUNT = len(INPUTS)
_TENSORS = ", ".join(("Tensor " if name in "qv" else "Tensor? ") + (name + "_" if name == "lambda" else name) for name in INPUTS)
_OPTIONS = "str rule, float scale, bool v_first, int form, int chunk, int segment, bool bf16_operands, str gates, int max_seqlen"
_OPTION_COUNT = len(Config._fields)

_library = torch.library.Library("fastweight", "DEF")
_library.define(f"forward({_TENSORS}, Tensor? cu_seqlens, {_OPTIONS}, bool final, bool save) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"backward({_TENSORS}, Tensor? cu_seqlens, {_OPTIONS}, Tensor? d_o, Tensor? d_final_state, Tensor? d_final_precond, Tensor? saved, bool[] wanted)"
    " -> Tensor[]"
)
_library.define(f"step_({_TENSORS}, Tensor? cu_seqlens, {_OPTIONS}, Tensor(a!) state, Tensor(b!)? precond_state, Tensor? slots) -> Tensor")


def _split(arguments):
    """inputs, cu_seqlens, config, the rest."""
    inputs, cu_seqlens = arguments[:_COUNT], arguments[_COUNT]
    end = _COUNT + 1 + _OPTION_COUNT
    return inputs, cu_seqlens, Config(*arguments[_COUNT + 1 : end]), arguments[end:]


def _nothing(like, dtype):
    return torch.empty(0, dtype=dtype, device=like.device)


def _present(tensor):
    return tensor if tensor is not None and tensor.numel() > 0 else None


def _sequences(inputs, cu_seqlens):
    return inputs[Q].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _forward(*arguments):
    inputs, cu_seqlens, config, (final, save) = _split(arguments)
    q = inputs[Q]
    size = _calls.saved_bound(config, inputs, _sequences(inputs, cu_seqlens), cu_seqlens is not None) if save else 0
    o, *rest = _calls.forward(config, inputs, _calls.offsets_of(cu_seqlens, config.max_seqlen), final, size)
    dtype = _calls.state_dtype(q.dtype)
    return (o, *[_nothing(q, d) if t is None else t for t, d in zip(rest, (dtype, dtype, torch.uint8))])


def _forward_fake(*arguments):
    inputs, cu_seqlens, config, (final, save) = _split(arguments)
    q, v = inputs[Q], inputs[V]
    n = _sequences(inputs, cu_seqlens)
    o = q.new_empty((q.shape[0], q.shape[1], v.shape[2], v.shape[3]))
    dtype = _calls.state_dtype(q.dtype)
    state = _calls.state_shape(config, n, v.shape[2], q.shape[3], v.shape[3]) if final else (0,)
    precond = (n, q.shape[2], q.shape[3]) if final and _calls.uses_precond(config.rule) else (0,)
    size = _calls.saved_bound(config, inputs, n, cu_seqlens is not None) if save else 0
    return o, q.new_empty(state, dtype=dtype), q.new_empty(precond, dtype=dtype), q.new_empty((size,), dtype=torch.uint8)


def _backward(*arguments):
    inputs, cu_seqlens, config, (d_o, d_state, d_precond, saved, wanted) = _split(arguments)
    cotangents = (d_o, _present(d_state), _present(d_precond))
    gradients = _calls.backward(config, inputs, _calls.offsets_of(cu_seqlens, config.max_seqlen), cotangents, _present(saved), wanted)
    return [g for g in gradients if g is not None]


def _backward_fake(*arguments):
    inputs, _, _, rest = _split(arguments)
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t, want in zip(inputs, rest[-1]) if want and t is not None]


def _step(*arguments):
    inputs, cu_seqlens, config, (state, precond_state, slots) = _split(arguments)
    return _calls.step(config, inputs, _calls.offsets_of(cu_seqlens, config.max_seqlen), state, precond_state, slots)


def _step_fake(*arguments):
    q, v = arguments[Q], arguments[V]
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2], v.shape[3]))


for _name, _implementation, _fake in (("forward", _forward, _forward_fake), ("backward", _backward, _backward_fake), ("step_", _step, _step_fake)):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    torch.library.register_fake(f"fastweight::{_name}", _fake, lib=_library)


def _setup(ctx, inputs, output):
    tensors, cu_seqlens, config, (final, _) = _split(inputs)
    ctx.save_for_backward(*tensors, cu_seqlens, output[3])
    ctx.config = config
    ctx.final = final
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_o, d_state, d_precond, _):
    *tensors, cu_seqlens, saved = ctx.saved_tensors
    wanted = [bool(need and t is not None) for need, t in zip(ctx.needs_input_grad, tensors)]
    dtype = tensors[Q].dtype
    state_dtype = _calls.state_dtype(dtype)
    cotangents = (usable(d_o, dtype), usable(d_state, state_dtype) if ctx.final else None, usable(d_precond, state_dtype) if ctx.final else None)
    found = iter(torch.ops.fastweight.backward(*tensors, cu_seqlens, *ctx.config, *cotangents, saved, wanted))
    gradients = [next(found) if want else None for want in wanted]
    return (*gradients, *[None] * (1 + _OPTION_COUNT + 2))


torch.library.register_autograd("fastweight::forward", _differentiate, setup_context=_setup, lib=_library)


torch.library.register_autograd("fastweight::backward", no_second, lib=_library)
