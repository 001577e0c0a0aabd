"""Arguments as a call takes them: tensors on one device, of types that the library knows, their last dimension contiguous.

A call has one 16-bit type: where tensors of tokens are bfloat16, float16 ones become float32. States become the state's type; conversions are torch's, so autograd brings gradients back to the types
that came. Only what a copy needs is copied: strided views of one projection are taken as they are.
"""

import torch

from fastweight._library import Error
from fastweight.torch._plans import INPUTS, STATES, state_dtype

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _usable(name, tensor, dtype, device, double, narrow):
    if not isinstance(tensor, torch.Tensor):
        raise Error(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device != device:
        raise Error(f"{name}: expected a tensor on {device}, as q is, got one on {tensor.device}")
    if tensor.dtype not in _TYPES:
        raise Error(f"{name}: expected a floating-point tensor of 16, 32 or 64 bits, got {tensor.dtype}")
    if tensor.dim() > 4 or tensor.dim() == 0:
        raise Error(f"{name}: expected a tensor of 1 to 4 dimensions, got shape {list(tensor.shape)}")
    if name in STATES:
        if tensor.dtype != dtype:
            tensor = tensor.to(dtype)
    elif double:
        tensor = tensor.double()
    elif tensor.dtype not in (torch.float32, narrow):
        tensor = tensor.float()
    return tensor if tensor.stride(-1) == 1 or tensor.dim() < 4 and name not in STATES else tensor.contiguous()


def inputs_of(tensors):
    """Tensors in the order of the C header from {name: tensor or None}."""
    q = tensors["q"]
    for name in ("q", "k", "v"):
        if name == "k" and tensors[name] is None:  # rules that take it from the decay; of the others the library says it
            continue
        if not isinstance(tensors[name], torch.Tensor):
            raise Error(f"{name}: expected a torch.Tensor, got {type(tensors[name]).__name__}")
        if tensors[name].dim() != 4:
            raise Error(f"{name}: expected 4 dimensions [B, T, heads, dim], got shape {list(tensors[name].shape)}")
    if q.device.type not in ("cpu", "cuda"):
        raise Error(f"q: expected a tensor on the CPU or on CUDA, got one on {q.device}")
    types = {t.dtype for name, t in tensors.items() if isinstance(t, torch.Tensor) and name in INPUTS and name not in STATES}
    double = torch.float64 in types
    narrow = torch.bfloat16 if torch.bfloat16 in types else torch.float16
    dtype = torch.float64 if double else state_dtype(q.dtype)
    out = []
    for name in INPUTS:
        tensor = tensors.get(name)
        out.append(None if tensor is None else _usable(name, tensor, dtype, q.device, double, narrow))
    return tuple(out)


def check_offsets(cu_seqlens, q):
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.shape[0] < 2:
        shown = f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}" if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise Error(f"cu_seqlens: expected a tensor of int32 or int64 with N + 1 offsets (N >= 1), got {shown}")
    if q.shape[0] != 1:
        raise Error(f"q: expected batch size 1 with cu_seqlens (sequences one after the other), got {q.shape[0]}")
