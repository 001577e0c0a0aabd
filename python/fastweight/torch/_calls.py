"""Calls of the C interface on tensors, without autograd and without the dispatcher.

A prepared call (Forward, Backward, Step) has the plan and the structs of one signature: the rule and its options, type, shape, strides and device of every
tensor, offsets of the sequences, the stream. Running it makes outputs, writes addresses and calls. Prepared calls belong to a thread (_plans.kept()).

Tensors come here checked for kind and device (_arguments.py); whether shapes and types fit the rule is the library's to say, and
its message names the argument. "present" is what there is of a call's tensors, in their order.
"""

import ctypes

import torch

from fastweight import _library
from fastweight.torch import _checks
from fastweight.torch._plans import (  # noqa: F401: some are for _operators.py and the tests
    FORMS, INITIAL_PRECOND, INITIAL_STATE, INPUTS, Config, Plan, Q, Ring, STATES, Shapes, Slots, Tensors, V, descriptor, io_dtype, keep, kept, offsets_of, see, seen,
    shapes_of, signature, sizes_of, state_dtype,
)

_ROWS = 64  # what saved_bound() counts in: the rows of a chunk on CUDA, a multiple of those on the CPU
_KEPT_WORKSPACE = 1 << 16  # bytes: smaller workspaces on the CPU stay with their call. On CUDA the caching allocator knows streams and graphs


def uses_precond(rule):
    return _library.rule_struct(rule).precond != 0


def state_shape(config, n, hv, k, v):
    return (n, hv, v, k) if config.v_first else (n, hv, k, v)


def stream_of(tensor):
    """The current stream of a tensor's device as a number; 0 on the CPU."""
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else 0


def present_of(tensors):
    return [t for t in tensors if t is not None]


# What torch.compile's programs make tensors on the CPU with, in half the time of torch.empty: (size, strides, dtype).
_empty_cpu = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cpu", None)


def dense(shape, dtype):
    """(size, strides, dtype) of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(shape), tuple(reversed(strides)), dtype


def explained(run, inputs):
    """run(), with a hint in the message of an error where the inputs seem to have another layout."""
    try:
        return run()
    except _library.Error as error:
        raise _library.Error(f"{error}{_checks.layout_hint(inputs)}") from None


class _Call:
    """plan, config, offsets, stream; _run(). A subclass says function, the bytes of its workspace and the tensors of its structs."""

    function = ""

    def __init__(self, config, inputs, offsets, stream, tensors, plan=None, slots=None):
        self.config, self.offsets, self.stream, self._slots = config, offsets, stream, slots
        self.places = tuple(i for i, t in enumerate(inputs) if t is not None)
        self.input_count = len(inputs)
        device = inputs[Q].device
        self._cpu = device.type == "cpu"
        # Makes tensors of (size, strides, dtype) there.
        self._empty = self._cpu and _empty_cpu or (lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=device))
        self._tensors = tensors
        self._saved, self._saved_bytes = ctypes.c_void_p(), ctypes.c_size_t()
        self._space, self._space_bytes = ctypes.c_void_p(), ctypes.c_size_t()
        # Without argtypes: what is passed are ctypes objects already.
        self._function = _library.library()[self.function]
        self._planned(plan or self._plan(inputs))

    def _plan(self, inputs):
        return explained(lambda: Plan(self.config, inputs, self.offsets, self.stream, self._slots, self.function == "fw_plan_step"), inputs)

    def _planned(self, plan):
        self.plan = plan
        self.workspace_bytes = self._space_bytes.value = self._needs()
        self._workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device="cpu") if self._cpu and self.workspace_bytes <= _KEPT_WORKSPACE else None
        if self._workspace is not None:
            self._space.value = self._workspace.data_ptr()
        saved = (self._saved, self._saved_bytes) if self.function != "fw_plan_step" else ()
        self._arguments = (plan.handle, *self._tensors.pointers, *saved, self._space, self._space_bytes)

    def _run(self, inputs):
        """inputs: the present ones; the structs point at everything."""
        if self._workspace is None:
            workspace = self._empty((self.workspace_bytes,), (1,), torch.uint8)
            self._space.value = workspace.data_ptr()
        status = self._function(*self._arguments)
        if status:
            everything = [None] * self.input_count
            for place, tensor in zip(self.places, inputs):
                everything[place] = tensor
            if not self.plan.outgrown():
                explained(lambda: _library.check(status), everything)
            self._planned(self._plan(everything))
            self._run(inputs)


class Forward(_Call):
    """o, the final states and what is kept for backward."""

    function = "fw_plan_forward"
    differentiable = None  # the caller's: _autograd.py

    def __init__(self, config, inputs, offsets, final, saved_bytes, stream):
        q, shapes = inputs[Q], shapes_of(inputs)
        n = offsets.count if offsets is not None else shapes.B
        state = state_dtype(q.dtype)
        self.dtype, self.state_dtype = q.dtype, state
        self._o = dense((shapes.B, shapes.T, shapes.HV, shapes.V), q.dtype)
        self._state = dense(state_shape(config, n, shapes.HV, shapes.K, shapes.V), state) if final else None
        self._precond = dense((n, shapes.H, shapes.K), state) if final and uses_precond(config.rule) else None
        self._asked = saved_bytes
        examples = [None if made is None else torch.empty_strided(*made[:2], dtype=made[2], device=q.device) for made in (self._o, self._state, self._precond)]
        super().__init__(config, inputs, offsets, stream, Tensors(("fw_inputs", inputs), ("fw_outputs", examples)))

    def _needs(self):
        # -1: what the plan keeps. A fixed size that is too small keeps nothing, and backward, which sees the same, recomputes.
        self._keeps = self.plan.saved if self._asked < 0 or self.plan.saved <= self._asked else 0
        self._buffer = self._keeps if self._asked < 0 else self._asked
        self._saved_bytes.value = self._keeps if self._asked else 0
        return self.plan.forward_saving if self._asked and self._keeps else self.plan.forward

    def __call__(self, present):
        """(o, final_state, final_precond, saved)."""
        empty, saved = self._empty, None
        if self._asked:
            saved = empty((self._buffer,), (1,), torch.uint8)
            self._saved.value = saved.data_ptr() if self._keeps else None
        o = empty(*self._o)
        if self._state is None:
            self._tensors.point((*present, o))
            self._run(present)
            return o, None, None, saved
        state = empty(*self._state)
        precond = None if self._precond is None else empty(*self._precond)
        self._tensors.point((*present, o, state) if precond is None else (*present, o, state, precond))
        self._run(present)
        return o, state, precond, saved


class Backward(_Call):
    """Gradients with respect to the present inputs of which wanted is true, in their types; None for the others."""

    function = "fw_plan_backward"

    def __init__(self, config, inputs, offsets, cotangents, wanted, has_saved, stream, plan=None):
        self._has_saved = has_saved
        gradients = [torch.empty(t.shape, dtype=t.dtype, device=t.device) if t is not None and want else None for t, want in zip(inputs, wanted)]
        self._made = tuple([None if d is None else dense(d.shape, d.dtype) for t, d in zip(inputs, gradients) if t is not None])
        self._all = None not in self._made
        tensors = Tensors(("fw_inputs", inputs), ("fw_outputs", cotangents), ("fw_inputs", gradients))
        super().__init__(config, inputs, offsets, stream, tensors, plan)

    def _needs(self):
        self._keeps = self._has_saved and self.plan.saved > 0
        if not self._keeps:
            self._saved.value = None
        self._saved_bytes.value = self.plan.saved if self._keeps else 0
        return self.plan.backward if self._keeps or self.plan.saved == 0 else self.plan.backward_alone

    def __call__(self, present, cotangents, saved):
        empty = self._empty
        if self._all:
            gradients = made = [empty(*like) for like in self._made]
        else:
            gradients = [None if like is None else empty(*like) for like in self._made]
            made = present_of(gradients)
        self._tensors.point((*present, *cotangents, *made))
        if self._keeps:
            self._saved.value = saved.data_ptr()
        self._run(present)
        return gradients


class Step(_Call):
    """o of the token form; the states (or those at the slots) are updated in place."""

    function = "fw_plan_step"

    def __init__(self, config, inputs, offsets, slots, stream, finals=None):
        """finals: the tensors that are written, if they are others."""
        q, shapes = inputs[Q], shapes_of(inputs)
        self._o = dense((shapes.B, shapes.T, shapes.HV, shapes.V), q.dtype)
        outputs = (q.new_empty(self._o[0]), *(finals or (inputs[INITIAL_STATE], inputs[INITIAL_PRECOND])))
        super().__init__(config, inputs, offsets, stream, Tensors(("fw_inputs", inputs), ("fw_outputs", outputs)), slots=slots)

    def _needs(self):
        return self.plan.forward

    def __call__(self, present, states):
        """present: the inputs with the states among them; states: the present ones again, or the finals, which are written."""
        o = self._empty(*self._o)
        self._tensors.point((*present, o, *states))
        self._run(present)
        return o


def forward_call(config, inputs, offsets, final, saved_bytes=0, differentiated=False):
    """saved_bytes: 0: keep nothing, -1: keep what backward wants, else a buffer of this size. differentiated: whether it is for gradients: such a call is one of its own."""
    stream = stream_of(inputs[Q])
    key = ("forward", config, signature(inputs), offsets and offsets.key, final, saved_bytes, differentiated, stream)
    call = kept().get(key)
    if call is None:
        call = keep(key, Forward(config, inputs, offsets, final, saved_bytes, stream))
    return call


def forward(config, inputs, offsets, final, saved_bytes=0):
    return forward_call(config, inputs, offsets, final, saved_bytes)(present_of(inputs))


def backward(config, inputs, offsets, cotangents, saved, wanted):
    """Of all inputs, None for those that are absent or not wanted."""
    stream = stream_of(inputs[Q])
    key = ("backward", config, signature(inputs), offsets and offsets.key, signature(cotangents), tuple(wanted), saved is not None and saved.numel(), stream)
    call = kept().get(key)
    if call is None:
        call = Backward(config, inputs, offsets, cotangents, wanted, False, stream)
        if saved is not None and saved.numel() >= call.plan.saved > 0:
            call = Backward(config, inputs, offsets, cotangents, wanted, True, stream, call.plan)
        keep(key, call)
    found = iter(call(present_of(inputs), present_of(cotangents), saved))
    return tuple([None if t is None else next(found) for t in inputs])


class Prefill(Step):
    """The same of any tokens, in any form."""

    function = "fw_plan_forward"


def step_call(config, inputs, offsets, slots, finals=None, kind=Step):
    """inputs: with the states. slots: a tensor, or Slots."""
    stream = stream_of(inputs[Q])
    if isinstance(slots, torch.Tensor):
        slots = Slots(slots)
    key = (kind, config, signature(inputs), offsets and offsets.key, slots and slots.key(), finals and signature(finals), stream)
    call = kept().get(key)
    return keep(key, kind(config, inputs, offsets, slots, stream, finals)) if call is None else call


def step(config, inputs, offsets, state, precond_state, slots):
    inputs = list(inputs)
    inputs[INITIAL_STATE], inputs[INITIAL_PRECOND] = state, precond_state
    return step_call(config, inputs, offsets, slots)(present_of(inputs), present_of((state, precond_state)))


_units = {}


def saved_bound(config, inputs, sequences, packed):
    """Bytes that suffice for what forward keeps, as a formula of tokens and sequences: an operator that is traced must say its outputs' sizes
    before it runs, for lengths that are not numbers yet. Measured at some lengths and rounded up; where it is short after all, backward recomputes."""
    shapes = shapes_of(inputs)
    dtype = inputs[Q].dtype
    io = io_dtype(inputs)
    key = (config, shapes.H, shapes.HV, shapes.K, shapes.V, dtype, io, inputs[Q].device)
    key = tuple(int(x) if isinstance(x, torch.SymInt) else x for x in key)
    unit = _units.get(key)
    if unit is None:
        unit = 0
        for chunks in (1, 8, 64, 512):
            probe = Shapes(1, chunks * _ROWS, *key[1:5])
            saved = sizes_of(descriptor(config, probe, dtype, io, key[-1], None)).saved
            unit = max(unit, -(-saved // (chunks * 256)) * 256)
        _units[key] = unit
    chunks = shapes.T // _ROWS + sequences if packed else shapes.B * ((shapes.T + _ROWS - 1) // _ROWS)
    return unit * chunks


def plan_text(config, inputs, offsets):
    q = inputs[Q]
    desc = descriptor(config, shapes_of(inputs), q.dtype, io_dtype(inputs), q.device, offsets)
    lib = _library.library()
    length = lib.fw_plan_text(ctypes.byref(desc), None, 0)
    if length == 0:
        raise _library.Error(lib.fw_last_error().decode())
    text = ctypes.create_string_buffer(length + 1)
    lib.fw_plan_text(ctypes.byref(desc), text, length + 1)
    return text.value.decode()
