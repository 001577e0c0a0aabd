"""The short convolution (fw_short_conv_*) on tensors: operators of torch.library and their gradients.

Tensors of a call: x [B, T, D], weight [D, W], bias [D], states [N, W - 1, D] of the last inputs, oldest first. Operators
take float32, float64 on the CPU and bfloat16 on CUDA; short_conv() converts the rest.
"""

import ctypes

import torch

from fastweight import _library
from fastweight.torch import _autograd, _plans

_DTYPES = _plans._DTYPES
_define = torch.library.Library("fastweight", "FRAGMENT")
_define.define("short_conv(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, int max_seqlen, bool final) -> (Tensor, Tensor)")
_define.define("short_conv_backward(Tensor d_y, Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, int max_seqlen)"
               " -> (Tensor, Tensor, Tensor)")
_define.define("short_conv_step_(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state) -> Tensor")


def _describe(x, weight, cu_seqlens, max_seqlen):
    """The descriptor, and what it points to."""
    conv = _library.new("fw_short_conv")
    conv.dtype = _DTYPES[x.dtype]
    conv.device = _plans._DEVICES[x.device.type]
    if x.is_cuda:
        conv.device_number = torch.cuda.current_device() if x.device.index is None else x.device.index
        conv.stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    conv.B, conv.T, conv.D = x.shape
    conv.W = weight.shape[-1]
    offsets = _plans.offsets_of(cu_seqlens, max_seqlen)
    if offsets is not None:
        offsets.describe_seqlens(conv.seqlens, conv.T)
    return conv, offsets


def _sequences(x, cu_seqlens):
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _tensors(**named):
    struct = _library.new("fw_short_conv_tensors")
    for name, tensor in named.items():
        if tensor is None:
            continue
        field = getattr(struct, name)
        field.data, field.dtype, field.rank = tensor.data_ptr(), _DTYPES[tensor.dtype], tensor.dim()
        for i, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
            field.shape[i], field.stride[i] = size, stride
    return struct


def _rows(x):
    """x as the library takes it: channels contiguous, one stride from token to token."""
    b, t, d = x.shape
    uniform = x.stride(2) == 1 and x.stride(1) >= d and (b == 1 or x.stride(0) == t * x.stride(1))
    return x if uniform or x.numel() == 0 else x.contiguous()


def _dense(t):
    return None if t is None else t.contiguous()


def _workspace(conv, x, backward):
    sizes = _library.new("fw_sizes")
    _library.check(_library.library().fw_short_conv_query(ctypes.byref(conv), ctypes.byref(sizes)))
    return torch.empty(sizes.backward if backward else sizes.forward, dtype=torch.uint8, device=x.device)


def _forward(x, weight, bias, initial_state, cu_seqlens, max_seqlen, final):
    x, weight, bias, initial_state = _rows(x), weight.contiguous(), _dense(bias), _dense(initial_state)
    conv, _keep = _describe(x, weight, cu_seqlens, max_seqlen)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    state = x.new_empty((_sequences(x, cu_seqlens), weight.shape[1] - 1, x.shape[2]) if final else (0,))
    space = _workspace(conv, x, False)
    tensors = _tensors(x=x, weight=weight, bias=bias, initial_state=initial_state, y=y, final_state=state if final else None)
    _library.check(_library.library().fw_short_conv_forward(ctypes.byref(conv), ctypes.byref(tensors), space.data_ptr(), space.numel()))
    return y, state


def _forward_fake(x, weight, bias, initial_state, cu_seqlens, max_seqlen, final):
    return x.new_empty(x.shape), x.new_empty((_sequences(x, cu_seqlens), weight.shape[1] - 1, x.shape[2]) if final else (0,))


def _backward(d_y, x, weight, bias, initial_state, cu_seqlens, max_seqlen):
    d_y, x, weight, bias, initial_state = _rows(d_y), _rows(x), weight.contiguous(), _dense(bias), _dense(initial_state)
    conv, _keep = _describe(x, weight, cu_seqlens, max_seqlen)
    d_x, d_weight = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)
    d_bias = weight.new_empty((0,)) if bias is None else torch.empty_like(bias)
    space = _workspace(conv, x, True)
    tensors = _tensors(x=x, weight=weight, bias=bias, initial_state=initial_state)
    gradients = _tensors(x=d_x, weight=d_weight, bias=None if bias is None else d_bias, y=d_y)
    _library.check(_library.library().fw_short_conv_backward(ctypes.byref(conv), ctypes.byref(tensors), ctypes.byref(gradients), space.data_ptr(), space.numel()))
    return d_x, d_weight, d_bias


def _backward_fake(d_y, x, weight, bias, initial_state, cu_seqlens, max_seqlen):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty((0,) if bias is None else bias.shape)


def _step(x, weight, bias, state):
    x, weight, bias = _rows(x), weight.contiguous(), _dense(bias)
    if not state.is_contiguous():
        raise _library.Error(f"state: expected a contiguous tensor, since it is updated in place, got strides {state.stride()}")
    conv, _keep = _describe(x, weight, None, 0)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    space = _workspace(conv, x, False)
    tensors = _tensors(x=x, weight=weight, bias=bias, initial_state=state, y=y)
    _library.check(_library.library().fw_short_conv_step(ctypes.byref(conv), ctypes.byref(tensors), space.data_ptr(), space.numel()))
    return y


def _step_fake(x, weight, bias, state):
    return x.new_empty(x.shape)


for _name, _implementation, _fake in (("short_conv", _forward, _forward_fake), ("short_conv_backward", _backward, _backward_fake), ("short_conv_step_", _step, _step_fake)):
    for _key in ("CPU", "CUDA"):
        _define.impl(_name, _implementation, _key)
    torch.library.register_fake(f"fastweight::{_name}", _fake, lib=_define)


def _setup(ctx, inputs, output):
    x, weight, bias, initial_state, cu_seqlens, ctx.max_seqlen, _ = inputs
    ctx.save_for_backward(x, weight, bias, initial_state, cu_seqlens)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, d_y, _):
    x, weight, bias, initial_state, cu_seqlens = ctx.saved_tensors
    if d_y is None:
        return (None,) * 7
    d_x, d_weight, d_bias = torch.ops.fastweight.short_conv_backward(d_y.to(x.dtype), x, weight, bias, initial_state, cu_seqlens, ctx.max_seqlen)
    return d_x, d_weight, None if bias is None else d_bias, None, None, None, None


def _no_second(ctx, *_):
    raise RuntimeError("fastweight: second derivatives are not computed (backward with create_graph=True and a derivative of its result)")


torch.library.register_autograd("fastweight::short_conv", _differentiate, setup_context=_setup, lib=_define)
torch.library.register_autograd("fastweight::short_conv_backward", _no_second, lib=_define)


def _last_inputs(x, initial_state, cu_seqlens, kept):
    """The last `kept` inputs of every sequence, by indices: differentiable, and exact where offsets end before T."""
    n = _sequences(x, cu_seqlens)
    if kept == 0:
        return x.new_empty((n, 0, x.shape[2]))
    before = x.new_zeros((n, kept, x.shape[2])) if initial_state is None else initial_state.to(x.dtype)
    if cu_seqlens is None:
        return torch.cat([before, x[:, -kept:]], 1)[:, -kept:].contiguous()
    offsets = cu_seqlens.to(device=x.device, dtype=torch.int64)
    begin, end = offsets[:-1, None], offsets[1:, None]
    place = torch.arange(kept, device=x.device)
    at = end - kept + place
    own = x[0][at.clamp(min=0)] if x.shape[1] > 0 else before
    shifted = torch.gather(before, 1, (place + end - begin).clamp(max=kept - 1)[..., None].expand(-1, -1, x.shape[2]))
    return torch.where((at >= begin)[..., None], own, shifted)


def _with_state_in_front(x, initial_state, cu_seqlens):
    """x with each sequence's state as tokens in front, its offsets, and the indices of x's own tokens in it: what gives initial_state a gradient."""
    kept = initial_state.shape[1]
    if cu_seqlens is None:
        return torch.cat([initial_state.to(x.dtype), x], 1), None, None
    offsets = cu_seqlens.to(device=x.device, dtype=torch.int64)
    n = offsets.shape[0] - 1
    longer = offsets + kept * torch.arange(n + 1, device=x.device)
    token = torch.arange(x.shape[1], device=x.device)
    own = token + kept * torch.bucketize(token, offsets[1:], right=True).clamp(max=n - 1).add(1)
    front = (longer[:-1, None] + torch.arange(kept, device=x.device)).reshape(-1)
    whole = x.new_zeros((1, x.shape[1] + n * kept, x.shape[2]))
    whole = whole.index_copy(1, front, initial_state.to(x.dtype).reshape(1, -1, x.shape[2])).index_copy(1, own, x)
    return whole, longer, own


def short_conv(x, weight, bias, initial_state, output_final_state, cu_seqlens, max_seqlen):
    """As fastweight.torch.nn.short_conv, of checked arguments."""
    _autograd.refuse_transforms((x, weight, bias, initial_state))
    dtype, kept = x.dtype, weight.shape[-1] - 1
    if torch.float64 in (x.dtype, weight.dtype) and not x.is_cuda:
        run = parameters = torch.float64
    else:
        run, parameters = (torch.bfloat16 if x.is_cuda and x.dtype == torch.bfloat16 else torch.float32), torch.float32
    x, weight = x.to(run), weight.reshape(weight.shape[0], -1).to(parameters)
    bias = None if bias is None else bias.to(parameters)
    initial_state = None if initial_state is None else initial_state.to(run)
    final_state = None
    longest = max_seqlen or 0
    if kept > 0 and initial_state is not None and torch.is_grad_enabled() and initial_state.requires_grad:
        whole, offsets, own = _with_state_in_front(x, initial_state, cu_seqlens)
        y = torch.ops.fastweight.short_conv(whole, weight, bias, None, offsets, longest and longest + kept, False)[0]
        y = y[:, kept:] if own is None else y[:, own]
        if output_final_state:
            final_state = _last_inputs(x, initial_state, cu_seqlens, kept)
    else:
        by_index = output_final_state and (longest > 0 or torch.is_grad_enabled() and x.requires_grad)
        y, final_state = torch.ops.fastweight.short_conv(x, weight, bias, initial_state, cu_seqlens, longest, output_final_state and not by_index)
        if by_index:
            final_state = _last_inputs(x, initial_state, cu_seqlens, kept)
    return y.to(dtype), final_state.to(dtype) if output_final_state else None
