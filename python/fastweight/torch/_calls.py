"""Calls of the C interface on tensors, without autograd and without the dispatcher.

A plan is a call's structs with shapes, strides and sizes filled in; it is made once for a signature (the rule and its options,
dtype, shape and strides of every tensor, offsets of the sequences) and kept per thread, so that a call only writes pointers.
The last ones used are kept (_MOST_PLANS): sequences of other lengths are other plans.

Tensors come here checked for kind and device (_arguments.py); whether shapes and types fit the rule is the library's to say, and
its message names the argument.
"""

import collections
import ctypes
import threading
import typing

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fastweight import _library

HEADER = _library.header()
INPUTS = tuple(name for name, _ in HEADER.structs["fw_inputs"]._fields_ if name != "size")
Q, V = (INPUTS.index(name) for name in "qv")
STATES = ("precond_center", "initial_state", "initial_precond")  # of the state's type; all other inputs are tensors of tokens
INITIAL_STATE, INITIAL_PRECOND = (INPUTS.index(name) for name in STATES[1:])
_DTYPES = {torch.float32: HEADER.enums["fw_dtype"]["f32"], torch.float64: HEADER.enums["fw_dtype"]["f64"], torch.bfloat16: HEADER.enums["fw_dtype"]["bf16"]}
_CUDA = HEADER.enums["fw_device"]["cuda"]
FORMS = HEADER.enums["fw_form"]
_MOST_PLANS = 512
_ROWS = 64  # what saved_bound() counts in: the rows of a chunk on CUDA, a multiple of those on the CPU


class Config(typing.NamedTuple):
    """What a call has beside tensors; hashable, and of types that an operator's schema knows."""

    rule: str
    scale: float = 0.0
    v_first: bool = False
    form: int = 0
    chunk: int = 0
    segment: int = 0
    bf16_operands: bool = False


class Outputs(typing.NamedTuple):
    o: torch.Tensor
    final_state: typing.Optional[torch.Tensor]
    final_precond: typing.Optional[torch.Tensor]
    saved: typing.Optional[torch.Tensor]


class Offsets:
    """Sequence offsets in host memory. `key` stands for their values."""

    def __init__(self, values):
        self.count = len(values) - 1
        self.array = (ctypes.c_int64 * len(values))(*values)
        self.key = bytes(self.array)


_offsets = WeakTensorKeyDictionary()


def offsets_of(cu_seqlens):
    """Host copy of a tensor of offsets, made once for a tensor that does not change: on CUDA the copy waits for the device."""
    if cu_seqlens is None:
        return None
    try:
        version = cu_seqlens._version
    except RuntimeError:  # inference tensors count no changes
        return Offsets(cu_seqlens.tolist())
    kept = _offsets.get(cu_seqlens)
    if kept is None or kept[0] != version:
        if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
            raise _library.Error(
                "cu_seqlens: expected offsets whose values are known while a CUDA graph is captured, got a device tensor not seen before; "
                "pass cu_seqlens_cpu, or call once before the capture (the graph keeps these offsets)"
            )
        kept = (version, Offsets(cu_seqlens.tolist()))
        _offsets[cu_seqlens] = kept
    return kept[1]


def _describe(struct, tensor):
    struct.dtype = _DTYPES[tensor.dtype]
    struct.rank = tensor.dim()
    for i, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        struct.shape[i] = size
        struct.stride[i] = stride


def uses_precond(rule):
    return _library.rule_struct(rule).precond != 0


def state_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def state_shape(config, n, hv, k, v):
    return (n, hv, v, k) if config.v_first else (n, hv, k, v)


class _Shapes(typing.NamedTuple):
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int


def _shapes(inputs):
    q, v = inputs[Q], inputs[V]
    return _Shapes(q.shape[0], q.shape[1], q.shape[2], v.shape[2], q.shape[3], v.shape[3])


def _descriptor(config, shapes, dtype, io_bf16, device_type, offsets):
    desc = _library.new("fw_desc")
    desc.rule = _library.rule_struct(config.rule)
    desc.dtype = _DTYPES[state_dtype(dtype)]
    desc.io_dtype = _DTYPES[torch.bfloat16] if io_bf16 else 0
    desc.form = config.form
    desc.operands = _DTYPES[torch.bfloat16] if config.bf16_operands else 0
    desc.scale = config.scale
    desc.chunk = config.chunk
    desc.segment = config.segment
    desc.state_layout = int(config.v_first)
    for name, value in shapes._asdict().items():
        setattr(desc, name, value)
    if offsets is not None:
        desc.cu_seqlens = ctypes.addressof(offsets.array)
        desc.num_sequences = offsets.count
    if device_type == "cuda":
        desc.device = _CUDA
    return desc


def _sizes(desc):
    sizes = _library.new("fw_sizes")
    _library.check(_library.library().fw_workspace_query(ctypes.byref(desc), ctypes.byref(sizes)))
    return sizes


class _Plan:
    """Structs of one signature. inputs and cotangents are filled from example tensors."""

    def __init__(self, config, inputs, offsets, cotangents, gradients, slots):
        first = inputs[Q]
        self.shapes = _shapes(inputs)
        self.N = offsets.count if offsets is not None else self.shapes.B
        self.offsets = offsets  # its array is what the descriptor points at
        tokens = [t for name, t in zip(INPUTS, inputs) if t is not None and name not in STATES]
        self.desc = _descriptor(config, self.shapes, first.dtype, any(t.dtype == torch.bfloat16 for t in tokens), first.device.type, offsets)
        self.device_index = first.device.index if first.device.type == "cuda" else None
        if slots is not None:
            self.desc.num_slots = inputs[INITIAL_STATE].shape[0]
            self.desc.slots = slots.data_ptr()  # for the query: which slots is said by each call
        sizes = _sizes(self.desc)
        self.forward, self.backward, self.saved, self.backward_alone = sizes.forward, sizes.backward, sizes.saved, sizes.backward_alone
        self.state_dtype = state_dtype(first.dtype)
        self.inputs, self.in_data = self._filled("fw_inputs", INPUTS, inputs)
        if cotangents is not None:
            self.outputs, self.out_data = self._filled("fw_outputs", ("o", "final_state", "final_precond"), cotangents)
            self.gradients, self.grad_data = self._filled("fw_inputs", INPUTS, gradients)
        else:
            self.outputs, self.out_data = self._filled("fw_outputs", ("o", "final_state", "final_precond"), gradients)
        self.pointers = tuple(ctypes.byref(x) for x in (self.desc, self.inputs, self.outputs))
        self.gradient_pointer = ctypes.byref(self.gradients) if cotangents is not None else None

    @staticmethod
    def _filled(struct, names, tensors):
        value = _library.new(struct)
        data = [getattr(value, name) if tensor is not None else None for name, tensor in zip(names, tensors)]
        for field, tensor in zip(data, tensors):
            if field is not None:
                _describe(field, tensor)
        return value, data


def _point(fields, tensors):
    for field, tensor in zip(fields, tensors):
        if field is not None:
            field.data = tensor.data_ptr()


_plans = threading.local()


def signature(tensors):
    """Everything about tensors that a plan depends on; hashable."""
    return tuple([None if t is None else (type(t), t.dtype, t.shape, t.stride(), t.device) for t in tensors])


def _kept_plans():
    kept = _plans.__dict__.get("kept")
    if kept is None:
        kept = _plans.kept = collections.OrderedDict()
    return kept


def _found(key):
    kept = _kept_plans()
    plan = kept.get(key)
    if plan is not None:
        kept.move_to_end(key)
    return plan


def _keep(key, plan):
    kept = _kept_plans()
    kept[key] = plan
    if len(kept) > _MOST_PLANS:
        kept.popitem(last=False)
    return plan


class _NoGuard:
    def __enter__(self):
        return None

    def __exit__(self, *_):
        return False


_NO_GUARD = _NoGuard()


def _on_device(plan):
    """Sets the call's stream; a context in which the tensors' device is the current one."""
    if plan.device_index is None:
        return _NO_GUARD
    plan.desc.stream = torch._C._cuda_getCurrentRawStream(plan.device_index)
    return _NO_GUARD if torch.cuda.current_device() == plan.device_index else torch.cuda.device(plan.device_index)


def _saved_size(plan, saved_bytes):
    """-1: what the plan needs. A fixed size that is too small keeps nothing, and backward, which sees the same, recomputes."""
    return plan.saved if saved_bytes < 0 else plan.saved if plan.saved <= saved_bytes else 0


def _new_outputs(config, inputs, offsets, want_final):
    """Arguments of torch.empty for o, the final state and the final preconditioner; None where there is none."""
    q, shapes = inputs[Q], _shapes(inputs)
    n = offsets.count if offsets is not None else shapes.B
    o = ((shapes.B, shapes.T, shapes.HV, shapes.V), q.dtype)
    if not want_final:
        return o, None, None
    dtype = state_dtype(q.dtype)
    precond = ((n, shapes.H, shapes.K), dtype) if uses_precond(config.rule) else None
    return o, (state_shape(config, n, shapes.HV, shapes.K, shapes.V), dtype), precond


def _made(sizes, device):
    return tuple([None if size is None else torch.empty(size[0], dtype=size[1], device=device) for size in sizes])


def forward(config, inputs, offsets, want_final, saved_bytes=0, key=None):
    """saved_bytes: 0: keep nothing, -1: keep what backward wants, else a buffer of this size. key: the inputs' signature, if known."""
    lib = _library.library()
    device = inputs[Q].device
    # The number of threads: the CPU's workspace has room for each.
    key = ("forward", lib.fw_get_threads(), config, key or signature(inputs), offsets and offsets.key, want_final)
    plan = _found(key)
    if plan is None:
        sizes = _new_outputs(config, inputs, offsets, want_final)
        plan = _keep(key, _Plan(config, inputs, offsets, None, _made(sizes, device), None))
        plan.results = sizes
    results = _made(plan.results, device)
    saved, kept = None, 0
    if saved_bytes != 0:
        kept = _saved_size(plan, saved_bytes)
        saved = torch.empty(kept if saved_bytes < 0 else saved_bytes, dtype=torch.uint8, device=device)
    workspace = torch.empty(plan.forward, dtype=torch.uint8, device=device)
    _point(plan.in_data, inputs)
    _point(plan.out_data, results)
    with _on_device(plan):
        status = lib.fw_forward(*plan.pointers, saved.data_ptr() if kept else None, kept, workspace.data_ptr(), plan.forward)
    if status:
        _library.check(status)
    return Outputs(*results, saved)


def backward(config, inputs, offsets, cotangents, saved, wanted, key=None):
    """Gradients with respect to the inputs of which wanted is true, in their types; None for the others. key: the inputs' signature, if known."""
    lib = _library.library()
    device = inputs[Q].device
    wanted = tuple([bool(want and t is not None) for t, want in zip(inputs, wanted)])
    key = ("backward", lib.fw_get_threads(), config, key or signature(inputs), offsets and offsets.key, signature(cotangents), wanted)
    plan = _found(key)
    gradients = tuple([torch.empty(t.shape, dtype=t.dtype, device=device) if want else None for t, want in zip(inputs, wanted)])
    if plan is None:
        plan = _keep(key, _Plan(config, inputs, offsets, cotangents, gradients, None))
    kept = plan.saved if saved is not None and saved.numel() >= plan.saved > 0 else 0
    size = plan.backward if kept or plan.saved == 0 else plan.backward_alone
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    _point(plan.in_data, inputs)
    _point(plan.out_data, cotangents)
    _point(plan.grad_data, gradients)
    with _on_device(plan):
        status = lib.fw_backward(*plan.pointers, plan.gradient_pointer, saved.data_ptr() if kept else None, kept, workspace.data_ptr(), size)
    if status:
        _library.check(status)
    return gradients


def step(config, inputs, offsets, state, precond_state, slots):
    """o of the token form; the states (or those at the slots) are updated in place."""
    q, v = inputs[Q], inputs[V]
    o = torch.empty((q.shape[0], q.shape[1], v.shape[2], v.shape[3]), dtype=q.dtype, device=q.device)
    inputs = list(inputs)
    inputs[INITIAL_STATE], inputs[INITIAL_PRECOND] = state, precond_state
    results = (o, state, precond_state)
    lib = _library.library()
    key = ("step", lib.fw_get_threads(), config, signature(inputs), offsets and offsets.key, slots is None)
    plan = _found(key) or _keep(key, _Plan(config, inputs, offsets, None, results, slots))
    if slots is not None:
        plan.desc.slots = slots.data_ptr()
    workspace = torch.empty(plan.forward, dtype=torch.uint8, device=q.device)
    _point(plan.in_data, inputs)
    _point(plan.out_data, results)
    with _on_device(plan):
        status = lib.fw_step(*plan.pointers, workspace.data_ptr(), plan.forward)
    _library.check(status)
    return o


_units = {}


def saved_bound(config, inputs, sequences, packed):
    """Bytes that suffice for what forward keeps, as a formula of tokens and sequences: an operator that is traced must say its outputs' sizes
    before it runs, for lengths that are not numbers yet. Measured at some lengths and rounded up; where it is short after all, backward recomputes."""
    shapes = _shapes(inputs)
    dtype = inputs[Q].dtype
    io_bf16 = any(t is not None and t.dtype == torch.bfloat16 for t in inputs)
    key = (config, shapes.H, shapes.HV, shapes.K, shapes.V, dtype, io_bf16, inputs[Q].device.type)
    key = tuple(int(x) if isinstance(x, torch.SymInt) else x for x in key)
    unit = _units.get(key)
    if unit is None:
        unit = 0
        for chunks in (1, 8, 64, 512):
            probe = _Shapes(1, chunks * _ROWS, *key[1:5])
            saved = _sizes(_descriptor(config, probe, dtype, io_bf16, key[-1], None)).saved
            unit = max(unit, -(-saved // (chunks * 256)) * 256)
        _units[key] = unit
    chunks = shapes.T // _ROWS + sequences if packed else shapes.B * ((shapes.T + _ROWS - 1) // _ROWS)
    return unit * chunks


def plan_text(config, inputs, offsets):
    q = inputs[Q]
    io_bf16 = any(t is not None and t.dtype == torch.bfloat16 for t in inputs)
    desc = _descriptor(config, _shapes(inputs), q.dtype, io_bf16, q.device.type, offsets)
    lib = _library.library()
    length = lib.fw_plan_text(ctypes.byref(desc), None, 0)
    if length == 0:
        raise _library.Error(lib.fw_last_error().decode())
    text = ctypes.create_string_buffer(length + 1)
    lib.fw_plan_text(ctypes.byref(desc), text, length + 1)
    return text.value.decode()
