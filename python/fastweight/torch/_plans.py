"""What a call needs of the C interface before it runs: its options, the plan of its shapes, and structs of tensors in which only addresses change.

A plan (fw_plan_create) is made once for a signature and kept with its call; sequences of other lengths are other plans, so the oldest go
(_MOST_CALLS of a thread stay). Structs belong to the thread that fills them, plans may be run by any.
"""

import ctypes
import threading
import typing

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fastweight import _library

HEADER = _library.header()
INPUTS = tuple(name for name, _ in HEADER.structs["fw_inputs"]._fields_ if name != "size")
OUTPUTS = tuple(name for name, _ in HEADER.structs["fw_outputs"]._fields_ if name != "size")
Q, V = (INPUTS.index(name) for name in "qv")
PARAMETERS = ("precond_center", "a_log", "dt_bias", "precond_a_log", "precond_dt_bias")
STATES = ("initial_state", "initial_precond", *PARAMETERS)  # of the state's type; all other inputs are tensors of tokens
INITIAL_STATE, INITIAL_PRECOND = (INPUTS.index(name) for name in STATES[:2])
_DTYPES = {
    getattr(torch, name): HEADER.enums["fw_dtype"][value]
    for name, value in (("float32", "f32"), ("float64", "f64"), ("bfloat16", "bf16"), ("float16", "f16"))
}
_DEVICES = HEADER.enums["fw_device"]
FORMS = HEADER.enums["fw_form"]
_MOST_CALLS = 1024
_WORD = 8  # bytes of an address


class Config(typing.NamedTuple):
    """What a call has beside tensors; hashable, and of types that an operator's schema knows."""

    rule: str
    scale: float = 0.0
    v_first: bool = False
    form: int = 0
    chunk: int = 0
    segment: int = 0
    bf16_operands: bool = False
    gates: str = ""
    max_seqlen: int = 0  # > 0: offsets on a device stay there, and no sequence is longer


class Offsets:
    """Sequence offsets in host memory. `key` stands for their values."""

    def __init__(self, values):
        self.count = len(values) - 1
        self.array = (ctypes.c_int64 * len(values))(*values)
        self.key = bytes(self.array)

    def describe(self, desc):
        self.describe_seqlens(desc.seqlens, desc.T)

    def describe_seqlens(self, seqlens, T):
        seqlens.cu_seqlens = ctypes.addressof(self.array)
        seqlens.num_sequences = self.count


class DeviceOffsets:
    """Offsets that the host never reads, and a bound of the lengths: calls are planned for any values that lie within, and `key` stands for where they are."""

    def __init__(self, tensor, max_seqlen):
        self._tensor = tensor  # a call that is kept has their address
        self._longest = max_seqlen
        self.count = tensor.shape[0] - 1
        self.key = (tensor.data_ptr(), tensor.shape[0], tensor.dtype, max_seqlen)

    def describe(self, desc):
        self.describe_seqlens(desc.seqlens, desc.T)

    def describe_seqlens(self, seqlens, T):
        seqlens.cu_seqlens = self._tensor.data_ptr()
        seqlens.num_sequences = self.count
        seqlens.bits = 8 * self._tensor.element_size()
        seqlens.memory = HEADER.enums["fw_seqlens_memory"]["seqlens_device"]
        seqlens.max_seqlen = min(self._longest, T)


_offsets = WeakTensorKeyDictionary()


def offsets_of(cu_seqlens, max_seqlen=0):
    """Offsets as a call takes them: those on CUDA as they are there, if there is a bound of the lengths; else a host copy, made once for a tensor that does not
    change: on CUDA the copy waits for the device."""
    if cu_seqlens is None:
        return None
    if max_seqlen and cu_seqlens.is_cuda:
        return DeviceOffsets(cu_seqlens if cu_seqlens.is_contiguous() else cu_seqlens.contiguous(), max_seqlen)
    try:
        version = cu_seqlens._version
    except RuntimeError:  # inference tensors count no changes
        return Offsets(cu_seqlens.tolist())
    kept = _offsets.get(cu_seqlens)
    if kept is None or kept[0] != version:
        if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
            raise _library.Error(
                "cu_seqlens: expected offsets whose values are known while a CUDA graph is captured, got a device tensor not seen before; "
                "pass max_seqlen, with which the graph reads them where they are, or cu_seqlens_cpu, or call once before the capture (the graph keeps these offsets)"
            )
        kept = (version, Offsets(cu_seqlens.tolist()))
        _offsets[cu_seqlens] = kept
    return kept[1]


def state_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


class Shapes(typing.NamedTuple):
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int


def shapes_of(inputs):
    q, v = inputs[Q], inputs[V]
    return Shapes(q.shape[0], q.shape[1], q.shape[2], v.shape[2], q.shape[3], v.shape[3])


def io_dtype(inputs):
    """The 16-bit type that tensors of tokens have beside float32, None if none has; a call has one (_arguments.py)."""
    for name, t in zip(INPUTS, inputs):
        if t is not None and t.dtype in (torch.bfloat16, torch.float16) and name not in STATES:
            return t.dtype
    return None


def descriptor(config, shapes, dtype, io, device, offsets):
    """io: io_dtype() of the inputs."""
    desc = _library.new("fw_desc")
    desc.rule = _library.rule_struct(config.rule)
    desc.gates = _library.gates_struct(config.gates)
    desc.dtype = _DTYPES[state_dtype(dtype)]
    desc.io_dtype = 0 if io is None else _DTYPES[io]
    desc.form = config.form
    desc.operands = _DTYPES[torch.bfloat16] if config.bf16_operands else 0
    desc.scale = config.scale
    desc.chunk = config.chunk
    desc.segment = config.segment
    desc.state_layout = int(config.v_first)
    for name, value in shapes._asdict().items():
        setattr(desc, name, value)
    if offsets is not None:
        offsets.describe(desc)
    desc.device = _DEVICES[device.type]
    if device.type == "cuda":
        desc.device_number = torch.cuda.current_device() if device.index is None else device.index
    return desc


class Ring(typing.NamedTuple):
    """Tokens that are not in the states yet (fw_ring); of `rows` a ring has room for."""

    tokens: int
    rows: int
    positions: torch.Tensor
    previous: typing.Optional[torch.Tensor] = None

    def describe(self, desc):
        desc.ring.tokens, desc.ring.rows, desc.ring.positions = self.tokens, self.rows, self.positions.data_ptr()
        if self.previous is not None:
            desc.ring.previous = self.previous.data_ptr()

    def key(self):
        return (self.tokens, self.rows, self.positions.data_ptr(), self.previous if self.previous is None else self.previous.data_ptr())


class Slots(typing.NamedTuple):
    """Where states lie in a pool (fw_state_pool, fw_speculation): tensors of int32 that are read when a call runs. Its key stands for where they are."""

    own: typing.Optional[torch.Tensor] = None
    tokens: typing.Optional[torch.Tensor] = None
    accepted: typing.Optional[torch.Tensor] = None
    finals: typing.Optional[torch.Tensor] = None
    states: int = 0  # of the pool of the tokens' states
    first: int = 0
    clears: bool = False
    checkpoints: typing.Optional[torch.Tensor] = None
    interval: int = 0  # tokens from one checkpoint to the next
    checkpoint_states: int = 0  # of the pool that has them
    ring: typing.Optional[Ring] = None

    def key(self):
        return tuple([(x.data_ptr(), x.shape) if isinstance(x, torch.Tensor) else x.key() if isinstance(x, Ring) else x for x in self])

    def describe(self, desc, state):
        pool, speculation, checkpoints = desc.state_pool, desc.speculation, desc.checkpoints
        if self.own is not None:
            pool.slots, pool.num_slots = self.own.data_ptr(), state.shape[0]
        if self.finals is not None:
            pool.final_slots = self.finals.data_ptr()
        pool.first_slot = self.first
        pool.skipped = HEADER.enums["fw_skipped"]["zero" if self.clears else "kept"]
        if self.tokens is not None:
            speculation.token_slots, speculation.columns, speculation.num_slots = self.tokens.data_ptr(), self.tokens.shape[1], self.states
        if self.accepted is not None:
            speculation.accepted = self.accepted.data_ptr()
        checkpoints.interval = self.interval
        if self.checkpoints is not None:
            checkpoints.slots, checkpoints.columns = self.checkpoints.data_ptr(), self.checkpoints.shape[1]
            checkpoints.num_slots = self.checkpoint_states
        if self.ring is not None:
            self.ring.describe(desc)


def sizes_of(desc):
    sizes = _library.new("fw_sizes")
    _library.check(_library.library().fw_workspace_query(ctypes.byref(desc), ctypes.byref(sizes)))
    return sizes


class Plan:
    """fw_plan of a descriptor, with its sizes. Destroyed with the last call that holds it."""

    handle = None

    def __init__(self, config, inputs, offsets, stream, slots=None, step=False):
        device = inputs[Q].device
        desc = descriptor(config, shapes_of(inputs), inputs[Q].dtype, io_dtype(inputs), device, offsets)
        if device.type == "cuda":
            desc.stream = stream
        if slots is not None:
            slots.describe(desc, inputs[INITIAL_STATE])
        lib = _library.library()
        handle = ctypes.c_void_p()
        self.threads = lib.fw_get_threads()
        _library.check(lib.fw_plan_create(ctypes.byref(desc), int(step), ctypes.byref(handle)))
        self.handle, self._destroy = handle, lib.fw_plan_destroy
        sizes = _library.new("fw_sizes")
        _library.check(lib.fw_plan_sizes(handle, ctypes.byref(sizes)))
        self.forward, self.backward, self.saved, self.backward_alone = sizes.forward, sizes.backward, sizes.saved, sizes.backward_alone
        self.forward_saving = sizes.forward_saving

    def __del__(self):
        if self.handle is not None:
            self._destroy(self.handle)

    def outgrown(self):
        """Whether there are more threads than when it was made: its workspace has no room for them, and its calls say so."""
        return _library.library().fw_get_threads() > self.threads


class Tensors:
    """Structs of tensors, described once from examples of the same shapes, types and strides; then point() writes addresses alone.

    structs: (name, examples) of each; they lie one after the other, so that one loop writes all of them."""

    def __init__(self, *structs):
        classes = [HEADER.structs[name] for name, _ in structs]
        buffer = (ctypes.c_uint64 * (sum(map(ctypes.sizeof, classes)) // _WORD))()
        self._words = memoryview(buffer).cast("B").cast("Q")
        self._places, self.pointers, begin = [], [], 0
        for struct, (name, examples) in zip(classes, structs):
            value = struct.from_buffer(buffer, begin)
            address = ctypes.addressof(value)
            _library.initialise(name, address)
            for (member, kind), tensor in zip([field for field in struct._fields_ if field[0] != "size"], examples):
                if tensor is None:
                    continue
                field = getattr(value, member)
                field.dtype = _DTYPES[tensor.dtype]
                field.rank = tensor.dim()
                for i, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
                    field.shape[i], field.stride[i] = size, stride
                self._places.append((begin + getattr(struct, member).offset + kind.data.offset) // _WORD)
            self.pointers.append(ctypes.c_void_p(address))
            begin += ctypes.sizeof(struct)

    def point(self, tensors):
        """tensors: those that were examples, without the absent ones, struct after struct."""
        words = self._words
        for place, tensor in zip(self._places, tensors):
            words[place] = tensor.data_ptr()


def signature(tensors):
    """Everything about tensors that a prepared call depends on; hashable."""
    return tuple([None if t is None else (type(t), t.dtype, t.shape, t.stride(), t.device, t.requires_grad) for t in tensors])


_kept = threading.local()


def kept():
    """This thread's prepared calls, the oldest first."""
    try:
        return _kept.calls
    except AttributeError:
        _kept.calls = {}
        return _kept.calls


def keep(key, call):
    calls = kept()
    calls[key] = call
    if len(calls) > _MOST_CALLS:
        calls.pop(next(iter(calls)))
        _kept.seen = {}  # what went must not be held there
    return call


# What torch.compile asks before it runs a graph again, one call for all tensors: type, dispatch keys, dtype, device, requires_grad, shape, strides. A signature says the same in
# five times the time.
_Guards = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
_MOST_GUARDS = 4  # of a key; where there are more shapes than that, signatures find the call


def seen(key, present):
    """What see() was told of this key and of tensors like these, or None."""
    try:
        known = _kept.seen.get(key)
    except AttributeError:
        _kept.seen = {}
        return None
    if known is not None:
        for check, found in known:
            if check(*present):
                return found
    return None


def see(key, present, found):
    """key: what a call depends on beside its tensors, and which of them there are. Dispatch keys are also of the mode (autocast, inference): in another, others are kept."""
    global _Guards
    if _Guards is None:
        return
    every = _kept.__dict__.setdefault("seen", {})
    if len(every) > _MOST_CALLS:
        every.clear()
    known = every.setdefault(key, [])
    if len(known) < _MOST_GUARDS:
        try:
            check = _Guards(*present, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        except TypeError:  # torch's own business: one that has them otherwise is served by signatures
            _Guards = None
            return
        if check(*present):  # not where one tensor is two inputs
            known.append((check, found))
