/* fastweight: delta-rule linear attention. The C99 interface of the recurrence: forward, backward, decode.
 *
 * One token of one head, with the state S [K, V] and the vectors r, w, e, z that a rule makes of q, k, v and gates:
 *     Sbar = Diag(exp g) S;   u = z - Sbar^T e;   S = Sbar + w u^T;   o = S^T r
 *
 * Shapes. B: batch; T: tokens; N: sequences; H: key heads; HV: value heads; K, V: key and value dimension.
 * HV is a multiple of H. Value head h reads key head h / (HV / H).
 *
 * ABI. Structs with a field `size` begin with their size in bytes. The fw_*_init functions set that size, and every
 * field to its default. Call them before other fields are set. All of these structs but fw_rule may grow at their end:
 * programs compiled with the header of 0.2.0 or newer run with any newer library of the same major version. A library
 * refuses a struct that is larger than it knows. All other structs keep their size, and their fields `reserved` must be
 * 0.
 *
 * Errors. Nothing throws. A call that fails returns a status other than FW_OK, and fw_last_error() says which argument
 * was wrong, what was expected, what came and what to do.
 *
 * Memory. fw_plan_create and fw_alloc allocate memory that the caller frees. No other call does.
 *
 * Tensors. Strides count elements. The last dimension of a tensor of rank 4 has stride 1. A call's dtype and io_dtype
 * (fw_desc) decide what a tensor may hold:
 *
 * | tensor dtype | fw_desc.dtype FW_F32                                      | fw_desc.dtype FW_F64 |
 * |--------------|-----------------------------------------------------------|----------------------|
 * | token        | FW_F32, or the call's io_dtype (each tensor on its own)   | FW_F64               |
 * | state        | FW_F32 or FW_BF16; FW_F32 where a call reads or writes a gradient | FW_F64       |
 * | parameter    | FW_F32                                                    | FW_F64               |
 *
 * CUDA. All tensors, the workspace and the saved buffer are device memory. Work is queued on fw_desc.stream, without
 * allocation or synchronisation, so a CUDA graph may capture it. dtype is FW_F32 and K at most 256. Which calls run as
 * chunks with operands FW_BF16 is the table in docs/internals/gpu_kernels.md. All others run one token at a time.
 *
 * Determinism. One build on one machine gives the same bits, for any number of threads and any other sequences. */
#ifndef FASTWEIGHT_FASTWEIGHT_H_
#define FASTWEIGHT_FASTWEIGHT_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define FW_API
#else
#define FW_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define FW_VERSION_MAJOR 0
#define FW_VERSION_MINOR 2
#define FW_VERSION_PATCH 0

/* Workspaces and saved buffers begin at a multiple of this many bytes. */
#define FW_ALIGNMENT 64

typedef enum fw_status {
  FW_OK = 0,
  FW_ERROR_ARGUMENT = 1,  /* an argument is wrong; nothing was written */
  FW_ERROR_WORKSPACE = 2, /* a workspace or saved buffer is too small or not aligned to FW_ALIGNMENT */
  FW_ERROR_MEMORY = 3,    /* out of memory, or of threads, which the message says */
  FW_ERROR_INTERNAL = 4,  /* a defect of this library */
  FW_ERROR_DEVICE = 5     /* no usable CUDA device, or a library built without CUDA */
} fw_status;

typedef enum fw_device {
  FW_DEVICE_CPU = 0,
  FW_DEVICE_CUDA = 1 /* the GPU fw_desc.device_number */
} fw_device;

typedef enum fw_dtype { FW_F32 = 1, FW_F64 = 2, FW_BF16 = 3, FW_F16 = 4 } fw_dtype;

/* The axes of a rule. Any combination is valid unless a field of fw_rule says otherwise. */
typedef enum fw_decay { FW_DECAY_NONE = 0, FW_DECAY_CONSTANT = 1, FW_DECAY_SCALAR = 2, FW_DECAY_CHANNEL = 3 } fw_decay;
typedef enum fw_update { FW_UPDATE_DELTA = 0, FW_UPDATE_ADDITIVE = 1 } fw_update;
typedef enum fw_gain {
  FW_GAIN_ONE = 0,             /* s = 1 */
  FW_GAIN_GATE = 1,            /* s = beta, in [0, gain_bound] */
  FW_GAIN_KACZMARZ = 2,        /* s = beta / (|k|^2 + gain_eps), beta is the paper's eta */
  FW_GAIN_NLMS = 3,            /* s = 1 / (|k|^2 + gain_eps) */
  FW_GAIN_LONGHORN = 4,        /* s = beta / (1 + beta |k|^2) */
  FW_GAIN_EFLA = 5,            /* s = (1 - exp(-beta |k|^2)) / |k|^2 */
  FW_GAIN_PRECOND_LONGHORN = 6 /* s = beta / (1 + beta k.(M k)), M the preconditioner without its normaliser */
} fw_gain;
/* What multiplies the erase key or the value. */
typedef enum fw_gate {
  FW_GATE_TIED = 0,     /* the gain s */
  FW_GATE_CHANNEL = 1,  /* a gate with one value per channel */
  FW_GATE_AVERAGED = 2, /* the mean of such a gate over its channels, for ablations */
  FW_GATE_SCALAR = 3    /* a gate with one value per value head */
} fw_gate;
/* The erase key: k, or the tensor erase_key. */
typedef enum fw_erase_key { FW_ERASE_KEY_TIED = 0, FW_ERASE_KEY_OWN = 1 } fw_erase_key;
/* Which state the erase reads: the one after its decay, or the one before it (S_{t-1}). */
typedef enum fw_erase_state { FW_ERASE_STATE_DECAYED = 0, FW_ERASE_STATE_PREVIOUS = 1 } fw_erase_state;
/* The vector along which the erase removes what it read: w, or the tensor erase_write. */
typedef enum fw_erase_write { FW_ERASE_WRITE_TIED = 0, FW_ERASE_WRITE_OWN = 1 } fw_erase_write;
/* The query feedback lambda: none, the tensor lambda, or the rule's number. */
typedef enum fw_feedback { FW_FEEDBACK_NONE = 0, FW_FEEDBACK_LEARNED = 1, FW_FEEDBACK_FIXED = 2 } fw_feedback;
/* The read vector: q, or q - d k. */
typedef enum fw_read { FW_READ_PLAIN = 0, FW_READ_CORRECTED = 1 } fw_read;
/* What the preconditioner multiplies: nothing, the write key, or the read vector. */
typedef enum fw_precond { FW_PRECOND_NONE = 0, FW_PRECOND_DIAGONAL = 1, FW_PRECOND_READ = 2 } fw_precond;
/* The preconditioner's values M from its state A, with s = y / (1 + |y|), y = log(A + precond_eps) - center. TANH runs
 * on the CPU alone. */
typedef enum fw_precond_form {
  FW_PRECOND_FORM_SQUASH = 0,           /* x^-s, in [1/x, x] */
  FW_PRECOND_FORM_SQUASH_LOW = 1,       /* x^(-(1 + s) / 2), in [1/x, 1] */
  FW_PRECOND_FORM_SQUASH_HIGH = 2,      /* x^((1 - s) / 2), in [1, x] */
  FW_PRECOND_FORM_INVERSE = 3,          /* 1 / (A_t + precond_ridge) */
  FW_PRECOND_FORM_INVERSE_PREVIOUS = 4, /* 1 / (A_{t-1} + precond_ridge) */
  FW_PRECOND_FORM_TANH = 5              /* x^-tanh(y), in [1/x, x] */
} fw_precond_form;
/* A factor on M, with c = k . (M k) of the normalised key. M is 1 without a preconditioner. With precond_form
 * INVERSE_PREVIOUS, ONE_PLUS and GATED give the exact step of a diagonal Gram matrix. */
typedef enum fw_normaliser {
  FW_NORMALISER_NONE = 0,
  FW_NORMALISER_KEY = 1,      /* 1 / c */
  FW_NORMALISER_ONE_PLUS = 2, /* 1 / (1 + c) */
  /* beta / (alpha + beta c), alpha = exp(precond_g), beta = precond_beta; both 1 without a preconditioner */
  FW_NORMALISER_GATED = 3
} fw_normaliser;
/* L2: x / sqrt(|x|^2 + norm_eps). */
typedef enum fw_norm { FW_NORM_RAW = 0, FW_NORM_L2 = 1 } fw_norm;
/* Where k comes from: its tensor, or the decay. k = 1 - exp(g) keeps its digits where g is near 0. */
typedef enum fw_key_source { FW_KEY_SOURCE_GIVEN = 0, FW_KEY_SOURCE_DECAY = 1 } fw_key_source;

/* A rule has a gain s, an erase gate b, a write gate c and a preconditioner M (its normaliser included). A tied gate is
 * s. Then
 *     e = b (k + lambda q),  z = c v,  w = M k,  r = scale (q - d k)
 * q and k are those after their normalisation. k in e is erase_key with erase_key OWN. d is 0 for a plain read. precond
 * READ moves M from w to r. update ADDITIVE sets e = 0. erase_write OWN takes its tensor as it is. On CUDA, erase_state
 * PREVIOUS and erase_write OWN need raw keys, gain ONE or GATE, H = HV, and neither feedback nor a preconditioner. */
typedef struct fw_rule {
  size_t size;
  int32_t decay;        /* fw_decay; CONSTANT: RetNet's log(1 - 2^(-5-h)) for value head h, no tensor g */
  int32_t update;       /* fw_update */
  int32_t gain;         /* fw_gain */
  int32_t erase;        /* fw_gate */
  int32_t write;        /* fw_gate */
  int32_t erase_key;    /* fw_erase_key */
  int32_t feedback;     /* fw_feedback */
  int32_t read;         /* fw_read */
  int32_t precond;      /* fw_precond */
  int32_t precond_form; /* fw_precond_form */
  int32_t normaliser;   /* fw_normaliser */
  int32_t q_norm;       /* fw_norm */
  int32_t k_norm;       /* fw_norm, of k and erase_key */
  /* With DECAY: a channel decay of H heads, no preconditioner and no tensor k. */
  int32_t key_source;   /* fw_key_source */
  int32_t erase_state;  /* fw_erase_state */
  int32_t erase_write;  /* fw_erase_write */
  double norm_eps;      /* inside the square root of the L2 norm, 1e-6 */
  double gain_eps;      /* of Kaczmarz and NLMS, 1e-6 */
  double gain_bound;    /* largest value of the gain gate or the erase gate, 1 or 2; gain_bound * (largest M) <= 2 */
  double lambda;        /* of feedback FIXED, 0.5 */
  double precond_x;     /* range of the preconditioner, 1 <= x <= 2, 1.5 */
  double precond_eps;   /* added to A inside the logarithm, 1e-6 */
  double precond_ridge; /* added to A in the inverse forms, 1 */
  int64_t reserved[8];  /* 0 */
} fw_rule;

/* How the tensor of a gate is given: as its value, or as the logit x that a layer projects. The call makes the value in
 * its own dtype, whatever type x has. a = exp(a_log) and b = dt_bias of fw_inputs, 1 and 0 where absent. Gradients are
 * those of the logit, of a_log and of dt_bias. Log-decays (g, precond_g) take all but SIGMOID, other gates VALUE and
 * SIGMOID. */
typedef enum fw_given {
  FW_GIVEN_VALUE = 0,
  FW_GIVEN_SIGMOID = 1,     /* bound sigmoid(x); bound: the rule's gain_bound for beta and erase_gate, else 1 */
  FW_GIVEN_SOFTPLUS = 2,    /* -a softplus(x + b) */
  FW_GIVEN_LOWER_BOUND = 3, /* lower_bound sigmoid(a (x + b)) */
  FW_GIVEN_LOGSIGMOID = 4   /* logsigmoid(x + b) / divisor; no a_log */
} fw_given;

/* The fw_given of every gate, by the tensor's name in fw_inputs. VALUE where the rule does not use the tensor. */
typedef struct fw_gates {
  int32_t g, beta, lambda, erase_gate, write_gate, precond_g, precond_beta;
  int32_t reserved[9]; /* 0 */
  double lower_bound;  /* of LOWER_BOUND, below 0; -5 */
  double divisor;      /* of LOGSIGMOID, above 0; 16 */
} fw_gates;

/* Which kernels run a sequence. */
typedef enum fw_form {
  FW_FORM_AUTO = 0,  /* CPU: by the length of each sequence; CUDA: chunks where there are kernels for them */
  FW_FORM_TOKEN = 1, /* one token at a time */
  FW_FORM_CHUNK = 2, /* chunks of `chunk` tokens, matrix products */
  FW_FORM_DECODE = 3 /* forward: the bits of fw_step; backward: chunks */
} fw_form;

typedef enum fw_state_layout {
  FW_STATE_K_FIRST = 0, /* [N, HV, K, V], V contiguous: flash-linear-attention's default */
  FW_STATE_V_FIRST = 1  /* [N, HV, V, K], K contiguous */
} fw_state_layout;

/* Where the sequence offsets lie. DEVICE is for CUDA. The host then never reads them: a call is planned for
 * num_sequences, T and max_seqlen, and reads the offsets when it runs. So one plan or CUDA graph serves any lengths
 * within these limits. The last offset may be below T: later rows are neither read nor written. Offsets that break the
 * limits give results without meaning, and access no memory outside the tensors. Long sequences are not cut into
 * segments. */
typedef enum fw_seqlens_memory { FW_SEQLENS_HOST = 0, FW_SEQLENS_DEVICE = 1 } fw_seqlens_memory;

/* What happens to the output of a sequence that fw_step skips because it has no slot. */
typedef enum fw_skipped { FW_SKIPPED_KEPT = 0, FW_SKIPPED_ZERO = 1 } fw_skipped;

/* A tensor of the caller. data == NULL: absent. */
typedef struct fw_tensor {
  void* data;
  int32_t dtype; /* fw_dtype */
  int32_t rank;
  int64_t shape[4];
  int64_t stride[4]; /* elements; the last is 1 */
} fw_tensor;

/* Sequences of different lengths, packed one after the other. cu_seqlens NULL: B sequences of T tokens. Else B is 1 and
 * N = num_sequences. */
typedef struct fw_seqlens {
  const void* cu_seqlens; /* N + 1 offsets: the first is 0, the last T, and they do not decrease */
  int64_t num_sequences;  /* N */
  int64_t max_seqlen;     /* of memory DEVICE: no sequence is longer; 0: T */
  int32_t bits;           /* of an offset, 32 or 64; 64 */
  int32_t memory;         /* fw_seqlens_memory */
  int64_t reserved[2];    /* 0 */
} fw_seqlens;

/* States in a pool, for servers. With `slots` the first dimension of the states is num_slots, and sequence n has its
 * states at slots[n]. A slot below first_slot is none: fw_step skips the sequence, fw_forward starts it from zero and
 * writes no states. Arrays are memory of the device, read when the call runs. fw_backward takes no slots. */
typedef struct fw_state_pool {
  const int32_t* slots;       /* [N]; NULL: states [N, ...] without a pool */
  const int32_t* final_slots; /* [N], of fw_forward: where the final states go instead; NULL: slots */
  int64_t num_slots;          /* of the pool */
  int32_t first_slot;         /* 0, or 1 for a server whose slot 0 belongs to no sequence; of all slots of a call */
  int32_t skipped;            /* fw_skipped */
  int64_t reserved[2];        /* 0 */
} fw_state_pool;

/* Speculative decoding, of fw_step. The states after every token are kept, and the next call starts from those of the
 * last accepted token. Nothing is copied. Arrays are memory of the device, read when the call runs. */
typedef struct fw_speculation {
  const int32_t* token_slots; /* [N, columns]: slots of final_state and final_precond for the states after each token */
  /* [N]: sequence n starts from slot token_slots[n, max(accepted[n], 1) - 1]; without state_pool.slots */
  const int32_t* accepted;
  int64_t columns; /* at least the tokens of the longest sequence */
  /* first dimension of final_state and final_precond; with accepted also of the initial states */
  int64_t num_slots;
  int64_t reserved[2]; /* 0 */
} fw_speculation;

/* Copies of the states inside a sequence, of fw_forward, for caches of prefixes. They go to the tensors checkpoints and
 * precond_checkpoints of fw_outputs. Checkpoint i of a sequence has the states after its first (i + 1) interval tokens.
 * A forward call that starts from it gives the bits of the whole one, unless sequences are cut into segments or the
 * checkpoint is FW_BF16. Without `slots`, checkpoint i of sequence n goes to place i + n floor(T / interval). For
 * packed sequences it is i + floor(tokens before sequence n / interval). Other places keep their contents. */
typedef struct fw_checkpoints {
  int64_t interval; /* tokens, a multiple of 64 and of the chunk; 0: no checkpoints */
  /* [N, columns], memory of the device, read when the call runs: slot of checkpoint i of sequence n */
  const int32_t* slots;
  int64_t columns;     /* with slots: at least the checkpoints of the longest sequence */
  int64_t num_slots;   /* with slots: first dimension of the checkpoint tensors; else that is B floor(T / interval) */
  int64_t reserved[2]; /* 0 */
} fw_checkpoints;

/* Decode that does not write the states (ring replay), of fw_step. A state stays as it was some tokens ago, and a ring
 * has what each token since then does to it: w, u and the decay. A step reads both and writes the ring alone. Every
 * `tokens` tokens they are folded into the state, in place. With S the state in memory, a_j = exp(g_j), and the ring's
 * tokens j = 1 to m in front of token t = m + 1:
 *     Sbar_t = Diag(a_1 .. a_t) S + sum over j of (a_{j+1} .. a_t w_j) u_j^T
 *
 * positions[n] counts the tokens that steps have given sequence n since fw_forward left its state: 0 after fw_forward.
 * The state in memory is that at the last multiple of `tokens`. Token i is row i mod `rows` of the ring, and positions
 * alone decide when it is folded: neither other sequences nor the cut into calls change a bit.
 *
 * To take tokens back, give `previous`, the positions of the call before. A call may then start at any position from
 * previous[n] on, and tokens are folded once no call can take them back.
 *
 * fw_forward with a ring first folds all of its tokens into initial_state, in place. Its final states are whole.
 *
 * Bits: those of fw_step where the position is a multiple of `tokens`, so with 1 all of them. Other tokens sum in
 * another order. A state of FW_BF16 is rounded once a fold. Rules with erase_write OWN have no ring. On CUDA
 * erase_state PREVIOUS needs decay SCALAR and an erase gate of one value, and the ring's strides are best multiples of
 * 4 numbers. No call with a ring has gradients. */
typedef struct fw_ring {
  int64_t tokens; /* from fold to fold, 1 to 64, at least those of a call's longest sequence; 0: no ring */
  int64_t rows;   /* of the ring, at least tokens + T - 1, with `previous` tokens + 2 T - 1; T: the most of a call */
  const int32_t* positions; /* [N], memory of the device, read when the call runs */
  const int32_t* previous;  /* [N], the same; not with a preconditioner; NULL: no token is taken back */
  int64_t reserved[2];      /* 0 */
} fw_ring;

/* What a call computes: everything except the tensors. */
typedef struct fw_desc {
  size_t size;
  fw_rule rule;
  fw_gates gates; /* which gates are given as logits */
  int32_t dtype;  /* fw_dtype of states and arithmetic: FW_F32 or FW_F64 */
  /* 0, or with dtype FW_F32: FW_BF16 or FW_F16, which token tensors may have; float16 above 65504 is infinite */
  int32_t io_dtype;
  /* of the chunk form's matrix products: 0: dtype; FW_BF16 (dtype FW_F32): rounded to bf16, float32 sums */
  int32_t operands;
  int32_t form;          /* fw_form */
  int32_t state_layout;  /* fw_state_layout of initial_state, final_state, checkpoints and their gradients */
  int32_t device;        /* fw_device */
  int32_t device_number; /* CUDA: of the GPU with all tensors and the stream; -1: the calling thread's current one */
  int32_t reserved;      /* 0 */
  void* stream;          /* CUDA: a cudaStream_t; NULL: the default stream */
  int64_t B, T, H, HV, K, V;
  double scale;  /* of the read vector; 0: K^-1/2 */
  int64_t chunk; /* rows of a chunk, 1 to 1024; 0: the library chooses */
  /* CUDA, chunk form: tokens of the segments that a long sequence is cut into, a multiple of 64; 0: the library chooses
   * by the shape of the call; -1: never. The bits of a result depend on it */
  int64_t segment;
  fw_seqlens seqlens;
  fw_state_pool state_pool;
  fw_speculation speculation;
  fw_checkpoints checkpoints;
  fw_ring ring;
} fw_desc;

/* Inputs of a call; shapes and dtypes are in the table of fw_forward. fw_backward writes gradients through a struct of
 * the same type. A tensor that the rule does not use must be absent. */
typedef struct fw_inputs {
  size_t size;
  fw_tensor q;               /* query */
  fw_tensor k;               /* key */
  fw_tensor v;               /* value */
  fw_tensor g;               /* log-decay, at most 0; or its logit, as the other gates (fw_gates) */
  fw_tensor beta;            /* gate of the gain */
  fw_tensor lambda;          /* query feedback */
  fw_tensor erase_key;       /* in place of k in the erase */
  fw_tensor erase_write;     /* in place of w in the erase */
  fw_tensor erase_gate;      /* multiplies the erase key */
  fw_tensor write_gate;      /* multiplies the value */
  fw_tensor read_correction; /* d of the corrected read */
  fw_tensor precond_g;       /* log-decay of the preconditioner, at most 0 */
  fw_tensor precond_beta;    /* its gain */
  fw_tensor precond_center;  /* of the squashed forms */
  fw_tensor initial_state;   /* absent: zero */
  fw_tensor initial_precond; /* absent: zero */
  fw_tensor a_log;           /* of the logits of g, SOFTPLUS and LOWER_BOUND; absent: zero */
  fw_tensor dt_bias;         /* of the logits of g, all but VALUE; absent: zero */
  fw_tensor precond_a_log;   /* of the logits of precond_g; absent: zero */
  fw_tensor precond_dt_bias; /* of the logits of precond_g; absent: zero */
} fw_inputs;

/* Outputs of a call, or the gradients with respect to them (cotangents; absent: zero). */
typedef struct fw_outputs {
  size_t size;
  fw_tensor o;
  fw_tensor final_state;         /* may be the memory of initial_state */
  fw_tensor final_precond;       /* may be the memory of initial_precond */
  fw_tensor checkpoints;         /* of fw_forward; may be the pool of final_state */
  fw_tensor precond_checkpoints; /* of fw_forward; may be the pool of final_precond */
  fw_tensor ring;                /* read and written; with ring.tokens */
} fw_outputs;

/* Bytes of workspaces and of the saved buffer. */
typedef struct fw_sizes {
  size_t size;
  size_t forward;        /* workspace of fw_forward without a saved buffer, and of fw_step */
  size_t forward_saving; /* workspace of fw_forward with a saved buffer, at most `forward` */
  size_t backward;       /* workspace of fw_backward with a saved buffer */
  size_t backward_alone; /* workspace of fw_backward without a saved buffer */
  size_t saved;          /* what fw_forward can save for fw_backward */
} fw_sizes;

/* The functions behind fw_desc_init and the others below; size is that of the caller's struct. */
FW_API void fw_desc_init_sized(fw_desc* desc, size_t size);
FW_API void fw_rule_init_sized(fw_rule* rule, size_t size);
FW_API void fw_inputs_init_sized(fw_inputs* inputs, size_t size);
FW_API void fw_outputs_init_sized(fw_outputs* outputs, size_t size);
FW_API void fw_sizes_init_sized(fw_sizes* sizes, size_t size);

/* Set the size and all defaults, also of the structs inside. fw_desc: float32 on the CPU, the default rule. */
static inline void fw_desc_init(fw_desc* desc) { fw_desc_init_sized(desc, sizeof(*desc)); }
/* The default rule: no decay, gain one, delta update, everything tied, raw keys. */
static inline void fw_rule_init(fw_rule* rule) { fw_rule_init_sized(rule, sizeof(*rule)); }
/* All tensors absent. */
static inline void fw_inputs_init(fw_inputs* inputs) { fw_inputs_init_sized(inputs, sizeof(*inputs)); }
/* All tensors absent. */
static inline void fw_outputs_init(fw_outputs* outputs) { fw_outputs_init_sized(outputs, sizeof(*outputs)); }
/* All sizes zero. */
static inline void fw_sizes_init(fw_sizes* sizes) { fw_sizes_init_sized(sizes, sizeof(*sizes)); }

/* Describes a contiguous tensor: rank values of shape. */
FW_API fw_tensor fw_tensor_of(void* data, fw_dtype dtype, int rank, const int64_t* shape);

/* Reads a rule: a preset's name ("kda"), axes and numbers ("decay=channel gain=longhorn"), or a name with changes
 * ("kda gain_bound=2"). On an error, *rule keeps its value. */
FW_API fw_status fw_rule_parse(const char* text, fw_rule* rule);

/* Writes the axes and numbers that differ from the default rule; fw_rule_parse reads them back. Writes at most `bytes`
 * with the final zero. Returns the length of the whole text without it, or 0 and fw_last_error(). */
FW_API size_t fw_rule_format(const fw_rule* rule, char* buffer, size_t bytes);

/* The rule of a name alone. */
FW_API fw_status fw_rule_preset(const char* name, fw_rule* rule);

/* The names of the presets in order; NULL past the last. */
FW_API const char* fw_rule_name(int index);

/* Host memory that is aligned to FW_ALIGNMENT and not initialised: workspaces and saved buffers of CPU calls. NULL and
 * fw_last_error() if there is not enough memory. Free it with fw_free. 0 bytes give an address too. On CUDA, cudaMalloc
 * aligns enough. */
FW_API void* fw_alloc(size_t bytes);
FW_API void fw_free(void* memory); /* NULL: nothing */

/* Workspace and saved sizes of a descriptor. They depend on it and on the number of threads alone. */
FW_API fw_status fw_workspace_query(const fw_desc* desc, fw_sizes* sizes);

/* FW_OK if calls can run on this fw_device; else FW_ERROR_DEVICE. */
FW_API fw_status fw_device_check(int32_t device);

/* What the calls of a descriptor do, as lines of text: form, kernels, grids, bytes. Needs no device. Writes at most
 * `bytes` with the final zero. Returns the length of the whole text without it, or 0 and fw_last_error(). */
FW_API size_t fw_plan_text(const fw_desc* desc, char* buffer, size_t bytes);

/* Outputs and final states of whole sequences.
 *
 * | tensor | shape | dtype | required when | written by |
 * |---|---|---|---|---|
 * | in.q | [B, T, H, K] | token | always | caller |
 * | in.k | [B, T, H, K] | token | key_source GIVEN | caller |
 * | in.v | [B, T, HV, V] | token | always | caller |
 * | in.g | decay SCALAR: [B, T, HV]; CHANNEL: [B, T, H or HV, K], with key_source DECAY [B, T, H, K] | token | decay SCALAR or CHANNEL | caller |
 * | in.beta | [B, T, HV] | token | a gain other than ONE and NLMS, if write is TIED, or erase is TIED and update DELTA | caller |
 * | in.lambda | [B, T, HV] | token | feedback LEARNED, update DELTA | caller |
 * | in.erase_key | [B, T, H, K] | token | erase_key OWN, update DELTA | caller |
 * | in.erase_write | [B, T, H, K] | token | erase_write OWN, update DELTA | caller |
 * | in.erase_gate | erase SCALAR: [B, T, HV]; else [B, T, H or HV, K] | token | erase not TIED, update DELTA | caller |
 * | in.write_gate | write SCALAR: [B, T, HV]; else [B, T, HV, V] | token | write not TIED | caller |
 * | in.read_correction | [B, T, HV] | token | read CORRECTED | caller |
 * | in.precond_g | [B, T, H] | token | precond not NONE | caller |
 * | in.precond_beta | [B, T, H] | token | precond not NONE | caller |
 * | in.precond_center | [H] | parameter | precond not NONE, a squashed form | caller |
 * | in.initial_state | [N, HV, K, V]; state_layout V_FIRST: [N, HV, V, K] | state | optional | caller |
 * | in.initial_precond | [N, H, K] | parameter | optional, precond not NONE | caller |
 * | in.a_log | [heads of g]; decay CHANNEL also [heads of g, K] | parameter | optional, gates.g SOFTPLUS or LOWER_BOUND | caller |
 * | in.dt_bias | [heads of g]; decay CHANNEL: [heads of g, K] | parameter | optional, gates.g not VALUE | caller |
 * | in.precond_a_log | [H] | parameter | optional, gates.precond_g SOFTPLUS or LOWER_BOUND | caller |
 * | in.precond_dt_bias | [H] | parameter | optional, gates.precond_g not VALUE | caller |
 * | out.o | [B, T, HV, V] | token | always | fw_forward |
 * | out.final_state | like in.initial_state | state | optional | fw_forward |
 * | out.final_precond | like in.initial_precond | parameter | optional, precond not NONE | fw_forward |
 * | out.checkpoints | like in.initial_state, with places for N | state | optional, checkpoints.interval not 0 | fw_forward |
 * | out.precond_checkpoints | like in.initial_precond, with places for N | parameter | optional, checkpoints.interval not 0, precond not NONE | fw_forward |
 * | out.ring | as in fw_step | as in fw_step | ring.tokens not 0; then in.initial_state too | fw_step |
 * | saved | sizes.saved bytes | bytes | optional (NULL), without state_pool.slots and ring | fw_forward, for fw_backward |
 * | workspace | sizes.forward bytes; sizes.forward_saving with saved | bytes | unless 0 bytes | fw_forward |
 *
 * With state_pool.slots, N of the states is state_pool.num_slots. */
FW_API fw_status fw_forward(const fw_desc* desc, const fw_inputs* in, const fw_outputs* out, void* saved,
                            size_t saved_bytes, void* workspace, size_t workspace_bytes);

/* Gradients of sum(o * d.o) + sum(final_state * d.final_state) + sum(final_precond * d.final_precond). What `grads`
 * names is overwritten; an absent gradient is not computed.
 *
 * | tensor | shape | dtype | required when | written by |
 * |---|---|---|---|---|
 * | in.(each) | as in fw_forward | as in fw_forward | as in fw_forward | caller |
 * | d.o | [B, T, HV, V] | token | optional | caller |
 * | d.final_state | like in.initial_state | FW_F32 or FW_F64, as fw_desc.dtype | optional | caller |
 * | d.final_precond | like in.initial_precond | parameter | optional, precond not NONE | caller |
 * | d.checkpoints, d.precond_checkpoints, d.ring | - | - | never | - |
 * | grads.(token tensor) | as in fw_forward; of a logit with the heads of in | token | optional | fw_backward |
 * | grads.initial_state | like in.initial_state | FW_F32 or FW_F64, as fw_desc.dtype | optional | fw_backward |
 * | grads.(other) | as in fw_forward; of a_log with the rank of in | parameter | optional | fw_backward |
 * | saved | sizes.saved bytes | bytes | optional (NULL: recomputed) | fw_forward of the same descriptor and inputs |
 * | workspace | sizes.backward bytes; sizes.backward_alone without saved | bytes | unless 0 bytes | fw_backward |
 * / */
FW_API fw_status fw_backward(const fw_desc* desc, const fw_inputs* in, const fw_outputs* d, const fw_inputs* grads,
                             const void* saved, size_t saved_bytes, void* workspace, size_t workspace_bytes);

/* Decode: one or a few tokens per sequence, one at a time whatever fw_desc.form says. To update states in place, give
 * the memory of in.initial_state as out.final_state. No two sequences may write one slot, or read one that another
 * writes.
 *
 * | tensor | shape | dtype | required when | written by |
 * |---|---|---|---|---|
 * | in.(each) | as in fw_forward | as in fw_forward | as in fw_forward | caller |
 * | out.o | [B, T, HV, V] | token | always | fw_step |
 * | out.final_state | like in.initial_state | state | optional | fw_step |
 * | out.final_precond | like in.initial_precond | parameter | optional, precond not NONE | fw_step |
 * | out.checkpoints, out.precond_checkpoints | - | - | never | - |
 * | out.ring | [N, HV, ring.rows, K + V + D]; D: K with decay CHANNEL, 1 with SCALAR, else 0 | FW_F32 or FW_F64, as fw_desc.dtype | ring.tokens not 0; then final_state is initial_state | fw_step |
 * | workspace | sizes.forward bytes | bytes | unless 0 bytes | fw_step |
 *
 * With speculation.token_slots, N of final_state and final_precond is speculation.num_slots; with speculation.accepted
 * that of initial_state and initial_precond too. */
FW_API fw_status fw_step(const fw_desc* desc, const fw_inputs* in, const fw_outputs* out, void* workspace,
                         size_t workspace_bytes);

/* A descriptor that is checked and planned once, for many calls. It copies what it needs of the descriptor, also
 * cu_seqlens in host memory. Slots stay the caller's memory. Any number of threads may use a plan. A plan keeps the
 * number of threads that it was made with as its limit. */
typedef struct fw_plan fw_plan;
/* step: 1 for fw_plan_step, 0 for fw_plan_forward and fw_plan_backward. On an error *plan is NULL. */
FW_API fw_status fw_plan_create(const fw_desc* desc, int step, fw_plan** plan);
FW_API void fw_plan_destroy(fw_plan* plan); /* NULL: nothing */
/* As fw_workspace_query. */
FW_API fw_status fw_plan_sizes(const fw_plan* plan, fw_sizes* sizes);
/* As fw_forward. */
FW_API fw_status fw_plan_forward(const fw_plan* plan, const fw_inputs* in, const fw_outputs* out, void* saved,
                                 size_t saved_bytes, void* workspace, size_t workspace_bytes);
/* As fw_backward. */
FW_API fw_status fw_plan_backward(const fw_plan* plan, const fw_inputs* in, const fw_outputs* d, const fw_inputs* grads,
                                  const void* saved, size_t saved_bytes, void* workspace, size_t workspace_bytes);
/* As fw_step. */
FW_API fw_status fw_plan_step(const fw_plan* plan, const fw_inputs* in, const fw_outputs* out, void* workspace,
                              size_t workspace_bytes);

/* Short convolution: causal, depthwise, with bias and SiLU, as layers have it before the recurrence.
 *
 *     p[t, c] = bias[c] + sum over j < W of weight[c, W-1-j] x[t-j, c];   y[t, c] = p[t, c] sigmoid(p[t, c])
 *
 * Every sequence begins anew. Inputs before its first token are in its state: the last W - 1 inputs, oldest first. */
typedef struct fw_short_conv {
  size_t size;
  /* fw_dtype of x, y, the states and their gradients: FW_F32, on the CPU FW_F64, on CUDA FW_BF16. Parameters and their
   * gradients: FW_F64 with FW_F64, else FW_F32 */
  int32_t dtype;
  int32_t device;        /* fw_device */
  int32_t device_number; /* as in fw_desc; -1 */
  int32_t reserved;      /* 0 */
  void* stream;          /* CUDA: a cudaStream_t; NULL: the default stream */
  int64_t B, T;          /* of sequences and tokens, as in fw_desc */
  int64_t D;             /* channels */
  int64_t W;             /* width, 1 to 256, on CUDA 1 to 8 */
  fw_seqlens seqlens;    /* memory DEVICE: the last offset is T */
} fw_short_conv;

/* Tensors of a short convolution, or gradients with respect to them. */
typedef struct fw_short_conv_tensors {
  size_t size;
  fw_tensor x;             /* [B, T, D]; channels have stride 1, tokens of all sequences one stride */
  fw_tensor weight;        /* [D, W], contiguous */
  fw_tensor bias;          /* [D], contiguous; absent: zero */
  fw_tensor initial_state; /* [N, W - 1, D], contiguous; absent: zero */
  fw_tensor y;             /* [B, T, D], as x */
  fw_tensor final_state;   /* like initial_state, may be its memory; absent: not wanted */
} fw_short_conv_tensors;

FW_API void fw_short_conv_init_sized(fw_short_conv* conv, size_t size);
FW_API void fw_short_conv_tensors_init_sized(fw_short_conv_tensors* tensors, size_t size);
/* Set the size and all defaults: float32 on the CPU, all tensors absent. */
static inline void fw_short_conv_init(fw_short_conv* conv) { fw_short_conv_init_sized(conv, sizeof(*conv)); }
static inline void fw_short_conv_tensors_init(fw_short_conv_tensors* tensors) {
  fw_short_conv_tensors_init_sized(tensors, sizeof(*tensors));
}

/* Workspace sizes: forward (also of a step) and backward. */
FW_API fw_status fw_short_conv_query(const fw_short_conv* conv, fw_sizes* sizes);

/* Writes y and final_state. */
FW_API fw_status fw_short_conv_forward(const fw_short_conv* conv, const fw_short_conv_tensors* tensors, void* workspace,
                                       size_t workspace_bytes);

/* Gradients of sum(y * d_y), from x, weight, bias and initial_state; y and final_state of `tensors` are absent. grads.y
 * is d_y. Overwrites grads.x, grads.weight and, with a bias, grads.bias, all of which are required. States have no
 * gradient: to get that of initial_state, run its inputs as tokens in front of x whose d_y is zero. */
FW_API fw_status fw_short_conv_backward(const fw_short_conv* conv, const fw_short_conv_tensors* tensors,
                                        const fw_short_conv_tensors* grads, void* workspace, size_t workspace_bytes);

/* Decode: fw_short_conv_forward of one token of each sequence, T = 1 without cu_seqlens. The state is updated in place:
 * initial_state is required, and final_state is absent. */
FW_API fw_status fw_short_conv_step(const fw_short_conv* conv, const fw_short_conv_tensors* tensors, void* workspace,
                                    size_t workspace_bytes);

/* Message of the calling thread's last call that failed; "" if none. Valid until its next call. */
FW_API const char* fw_last_error(void);

/* "FW_ERROR_ARGUMENT", ...; "unknown status" for a number that fw_status lacks. */
FW_API const char* fw_status_name(fw_status status);

/* The library's version, "major.minor.patch". */
FW_API const char* fw_version(void);

/* Threads of all later calls; 0 restores the default (OMP_NUM_THREADS or all cores). A running call keeps its number.
 */
FW_API void fw_set_threads(int threads);
FW_API int fw_get_threads(void);

/* The instruction set that the CPU kernels use on this machine: "AVX3", "AVX2", ... */
FW_API const char* fw_simd_target(void);

#ifdef __cplusplus
}
#endif

#endif /* FASTWEIGHT_FASTWEIGHT_H_ */
