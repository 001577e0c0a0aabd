/* fastweight: delta-rule linear attention. The C99 interface of the recurrence: forward, backward, decode.
 *
 * One token of one head (S is the state [K, V], r w e z the streams that a rule makes of q k v and gates):
 *     Sbar = Diag(exp g) S;   u = z - Sbar^T e;   S = Sbar + w u^T;   o = S^T r
 *
 * Letters: B batch, T tokens, N sequences, H key heads, HV value heads (HV a multiple of H; value head h reads key head
 * h / (HV / H)), K key dim, V value dim. Rank-4 tensors are [B, T, heads, dim], rank-3 are [B, T, heads].
 *
 * Conventions: every struct begins with its size in bytes (set it with FW_INIT, the field lets old programs run with a
 * newer library). Nothing but fw_plan_create allocates memory that the caller must free, nothing throws; each function returns a status and
 * fw_last_error() says, for the calling thread, which argument was wrong, what was expected and what came.
 * All tensors of a call have the descriptor's dtype; with io_dtype FW_BF16 or FW_F16 those of tokens (q, k, v, gates, o and their
 * gradients) may each be bf16 (float16) or float32 instead, while sums and parameters (center, a_log, dt_bias) stay float32. With dtype FW_F32 initial_state,
 * final_state and checkpoints may each be bf16 too, whatever io_dtype is: sums are float32. Strides count elements; the last dimension has stride 1.
 * CUDA (descriptor's device): every tensor, workspace and saved buffer is device memory; cu_seqlens is host memory, read before the
 * call returns, or device memory (seqlens_memory). Work is queued on the descriptor's stream: no allocation, no synchronisation, and a
 * graph may capture it. dtype is FW_F32 there, K at most 256, and the chunk form needs operands FW_BF16 and K at most 128 (256 without a
 * preconditioner, with gains up to 1 and no erase key of its own, where with one decay a token or none gates have one value a head, and where nothing is erased
 * and a channel decays by its own nothing is normalised); everything else runs one token at a time in float32.
 * Determinism: same build, same machine, same bits; the number of threads and the other sequences do not matter. */
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
#define FW_VERSION_MINOR 1
#define FW_VERSION_PATCH 0

typedef enum fw_status {
  FW_OK = 0,
  FW_ERROR_ARGUMENT = 1,  /* an argument is wrong; nothing was written */
  FW_ERROR_WORKSPACE = 2, /* a workspace or saved buffer is too small or not aligned to 64 bytes */
  FW_ERROR_MEMORY = 3,    /* out of memory, or of threads, which the message says */
  FW_ERROR_INTERNAL = 4,  /* a defect of this library */
  FW_ERROR_DEVICE = 5     /* no usable CUDA device, or a library built without CUDA */
} fw_status;

typedef enum fw_device {
  FW_DEVICE_CPU = 0,
  FW_DEVICE_CUDA = 1 /* the GPU of fw_desc.device_number */
} fw_device;

typedef enum fw_dtype { FW_F32 = 1, FW_F64 = 2, FW_BF16 = 3, FW_F16 = 4 } fw_dtype;

/* The axes of a rule. Any combination is valid but for what fw_rule's fields say. */
typedef enum fw_decay { FW_DECAY_NONE = 0, FW_DECAY_CONSTANT = 1, FW_DECAY_SCALAR = 2, FW_DECAY_CHANNEL = 3 } fw_decay;
typedef enum fw_update { FW_UPDATE_DELTA = 0, FW_UPDATE_ADDITIVE = 1 } fw_update;
typedef enum fw_gain {
  FW_GAIN_ONE = 0,             /* s = 1 */
  FW_GAIN_GATE = 1,            /* s = beta, as given: sigmoid in [0,1], or 2 sigmoid in [0,2] */
  FW_GAIN_KACZMARZ = 2,        /* s = beta / (|k|^2 + gain_eps), beta is the paper's eta */
  FW_GAIN_NLMS = 3,            /* s = 1 / (|k|^2 + gain_eps) */
  FW_GAIN_LONGHORN = 4,        /* s = beta / (1 + beta |k|^2) */
  FW_GAIN_EFLA = 5,            /* s = (1 - exp(-beta |k|^2)) / |k|^2 */
  FW_GAIN_PRECOND_LONGHORN = 6 /* s = beta / (1 + beta k.(M k)), M the preconditioner without its normaliser */
} fw_gain;
/* What multiplies the erase key or the value: the gain (TIED), a gate with one value a channel, the mean of such a gate over its
 * channels (what an ablation leaves of it), or a gate with one value a value head. */
typedef enum fw_gate { FW_GATE_TIED = 0, FW_GATE_CHANNEL = 1, FW_GATE_AVERAGED = 2, FW_GATE_SCALAR = 3 } fw_gate;
typedef enum fw_erase_key { FW_ERASE_KEY_TIED = 0, FW_ERASE_KEY_OWN = 1 } fw_erase_key; /* k, or a tensor p of its own */
/* What the erase looks at: the state after its decay, or the one before it (S_{t-1}). */
typedef enum fw_erase_state { FW_ERASE_STATE_DECAYED = 0, FW_ERASE_STATE_PREVIOUS = 1 } fw_erase_state;
/* Along which vector it takes away what it found: w, or a tensor f of its own. */
typedef enum fw_erase_write { FW_ERASE_WRITE_TIED = 0, FW_ERASE_WRITE_OWN = 1 } fw_erase_write;
typedef enum fw_feedback { FW_FEEDBACK_NONE = 0, FW_FEEDBACK_LEARNED = 1, FW_FEEDBACK_FIXED = 2 } fw_feedback; /* lambda: none, a tensor, the rule's number */
typedef enum fw_read { FW_READ_PLAIN = 0, FW_READ_CORRECTED = 1 } fw_read;                                     /* q, or q - d k */
typedef enum fw_precond { FW_PRECOND_NONE = 0, FW_PRECOND_DIAGONAL = 1, FW_PRECOND_READ = 2 } fw_precond;      /* of the write key; of the read vector */
/* The preconditioner's values M from its state A, with s = y / (1 + |y|), y = log(A + precond_eps) - center. */
typedef enum fw_precond_form {
  FW_PRECOND_FORM_SQUASH = 0,          /* x^-s, in [1/x, x] */
  FW_PRECOND_FORM_SQUASH_LOW = 1,      /* x^(-(1 + s) / 2), in [1/x, 1] */
  FW_PRECOND_FORM_SQUASH_HIGH = 2,     /* x^((1 - s) / 2), in [1, x] */
  FW_PRECOND_FORM_INVERSE = 3,         /* 1 / (A_t + precond_ridge) */
  FW_PRECOND_FORM_INVERSE_PREVIOUS = 4 /* 1 / (A_{t-1} + precond_ridge): with ONE_PLUS or GATED the exact step of a diagonal Gram matrix */
} fw_precond_form;
/* A factor on M, with c = k . (M k) of the normalised key; M is 1 without a preconditioner. */
typedef enum fw_normaliser {
  FW_NORMALISER_NONE = 0,
  FW_NORMALISER_KEY = 1,      /* 1 / c */
  FW_NORMALISER_ONE_PLUS = 2, /* 1 / (1 + c) */
  FW_NORMALISER_GATED = 3     /* beta / (alpha + beta c), alpha = exp(precond_g) and beta = precond_beta (1 without a preconditioner) */
} fw_normaliser;
typedef enum fw_norm { FW_NORM_RAW = 0, FW_NORM_L2 = 1 } fw_norm; /* L2: x / sqrt(|x|^2 + norm_eps) */
/* Where k comes from: a tensor, or the decay, k = 1 - exp(g), which keeps its digits where g is near 0. */
typedef enum fw_key_source { FW_KEY_SOURCE_GIVEN = 0, FW_KEY_SOURCE_DECAY = 1 } fw_key_source;

/* A rule: with gain s, erase gate b (s if tied), write gate c (s if tied), preconditioner M (times its normaliser; 1 if none)
 *     e = b (k + lambda q),  z = c v,  w = M k,  r = scale (q - d k)
 * k in e is p with an erase key of its own, d = 0 for a plain read, precond READ moves M from w to r, offline: e = 0. q, k and
 * p after their normalisation. What e finds is taken away along w, or along f, which is taken as it is given. */
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
  int32_t k_norm;       /* fw_norm, of k and p */
  int16_t key_source;   /* fw_key_source; DECAY: with a channel decay of H heads and no preconditioner, no tensor k */
  int8_t erase_state;   /* fw_erase_state; PREVIOUS with a decay: on the CPU. This and the next lie in what was padding in version 0.1 */
  int8_t erase_write;   /* fw_erase_write; OWN: on the CPU */
  double norm_eps;      /* inside the square root of the L2 norm, 1e-6 */
  double gain_eps;      /* Kaczmarz and NLMS, 1e-6 */
  double gain_bound;    /* largest value of the gain gate or the erase gate, 1 or 2; gain_bound * (largest M) <= 2 */
  double lambda;        /* feedback FIXED, 0.5 */
  double precond_x;     /* range of the preconditioner, 1 <= x <= 2, 1.5 */
  double precond_eps;   /* added to A inside the logarithm, 1e-6 */
  double precond_ridge; /* added to A in the inverse forms, 1 */
} fw_rule;

/* How the tensor of a gate is given: as its value, or as the logit x that a layer projects. A value is made of a logit inside the call, in the
 * arithmetic's dtype whatever type x has, with a = exp(a_log) and b = dt_bias of fw_inputs (1 and 0 where absent); gradients are those of the logit,
 * of a_log and of dt_bias. Log-decays (g, precond_g) may be given as VALUE, SOFTPLUS, LOWER_BOUND or LOGSIGMOID, other gates as VALUE or SIGMOID. */
typedef enum fw_given {
  FW_GIVEN_VALUE = 0,
  FW_GIVEN_SIGMOID = 1,     /* bound sigmoid(x); bound: the rule's gain_bound for beta and erase_gate, 1 for the others */
  FW_GIVEN_SOFTPLUS = 2,    /* -a softplus(x + b) */
  FW_GIVEN_LOWER_BOUND = 3, /* lower_bound sigmoid(a (x + b)) */
  FW_GIVEN_LOGSIGMOID = 4   /* logsigmoid(x + b) / divisor; no a_log */
} fw_given;

/* fw_given of every tensor of a gate, by the tensor's name in fw_inputs; VALUE where the rule does not use it. */
typedef struct fw_gates {
  int32_t g, beta, lambda, erase_gate, write_gate, precond_g, precond_beta;
  int32_t reserved;   /* 0 */
  double lower_bound; /* of LOWER_BOUND, < 0; -5 */
  double divisor;     /* of LOGSIGMOID, > 0; 16 */
} fw_gates;

typedef enum fw_form {
  FW_FORM_AUTO = 0,  /* CPU: by the length of each sequence; CUDA: chunks where they can */
  FW_FORM_TOKEN = 1, /* one token at a time */
  FW_FORM_CHUNK = 2  /* chunks of `chunk` tokens, matrix products */
} fw_form;

typedef enum fw_state_layout {
  FW_STATE_K_FIRST = 0, /* [N, HV, K, V], V contiguous: flash-linear-attention's default, and the library's own */
  FW_STATE_V_FIRST = 1  /* [N, HV, V, K], K contiguous */
} fw_state_layout;

/* Where cu_seqlens lies. DEVICE (CUDA): in device memory, and the host never reads it: a call is planned by bounds, num_sequences = N exactly, T the tokens
 * that the tensors have room for and max_seqlen, and looks at the offsets when it runs, so that one captured graph, or one plan, serves any lengths within
 * them. The last offset may then be below T: rows from there on are neither read nor written. Offsets that decrease, or beyond T, are taken as if they did not
 * (the results mean nothing, memory stays the caller's), and so is what is beyond max_seqlen. Long sequences are not cut into segments. */
typedef enum fw_seqlens_memory { FW_SEQLENS_HOST = 0, FW_SEQLENS_DEVICE = 1 } fw_seqlens_memory;

/* What becomes of the output of a sequence that fw_step skips, because it has no slot. */
typedef enum fw_skipped { FW_SKIPPED_KEPT = 0, FW_SKIPPED_ZERO = 1 } fw_skipped;

/* A tensor of the caller. data == NULL: absent. */
typedef struct fw_tensor {
  void* data;
  int32_t dtype; /* fw_dtype */
  int32_t rank;
  int64_t shape[4];
  int64_t stride[4]; /* elements; the last is 1 */
} fw_tensor;

typedef struct fw_desc {
  size_t size;
  fw_rule rule;
  int32_t dtype;    /* fw_dtype of states and arithmetic: FW_F32 or FW_F64 */
  int32_t io_dtype; /* 0: as dtype; FW_BF16 or FW_F16 (dtype FW_F32): each tensor of tokens is of that type or float32, as it says itself. What is beyond
                       65504 in a float16 tensor that a call writes is infinite */
  int32_t form;     /* fw_form */
  int32_t operands; /* of the chunk form's matrix products: 0: dtype; FW_BF16 (dtype FW_F32): rounded to bf16, sums float32 */
  int64_t B, T, H, HV, K, V;
  double scale;           /* of the read vector; 0 means K^-1/2 */
  int64_t chunk;          /* rows of a chunk, 1..1024; 0: the library chooses */
  int32_t state_layout;   /* fw_state_layout of initial_state, final_state and their gradients */
  int32_t seqlens_dtype;  /* width of cu_seqlens: 32 or 64 */
  const void* cu_seqlens; /* NULL: B sequences of T tokens. Else B = 1 and N + 1 offsets, the first 0, the last T (but see seqlens_memory) */
  int64_t num_sequences;  /* N with cu_seqlens, else ignored */
  int32_t device;         /* fw_device */
  void* stream;           /* CUDA: a cudaStream_t, NULL: the default stream */
  const int32_t* slots;   /* fw_step and fw_forward, memory of the device [N], read when the call runs: sequence n has its states at slot slots[n] of a pool.
                             Below first_slot: fw_step skips the sequence, fw_forward starts it from zero and leaves no states. NULL: slot n */
  int64_t num_slots;      /* with slots: first dimension of the states */
  int64_t segment;        /* CUDA, chunk form: sequences are cut into segments of so many tokens (a multiple of 64), which run side by side and
                             are joined exactly. 0: the library chooses by the shape of the call; -1: never. The bits of a result depend on it */
  fw_gates gates;         /* which gates are given as logits */
  int32_t device_number;  /* CUDA: of the GPU that everything lies on and the stream is of; -1: the calling thread's current one */
  int32_t seqlens_memory; /* fw_seqlens_memory */
  int64_t max_seqlen;     /* with FW_SEQLENS_DEVICE: no sequence is longer; 0: T */
  /* fw_step, for tokens that may be taken back (speculative decoding). With token_slots the states after every token are kept, and the next call starts
   * from that of the last token that was accepted: it is given accepted, and nothing is copied. Memory of the device, read when the call runs. */
  const int32_t* token_slots; /* [N, token_columns]: the states of sequence n after its token t go to slot token_slots[n, t] of final_state and final_precond
                                 (below first_slot: nowhere), and to no other place. No sequence may have more tokens than there are columns */
  int64_t token_columns;      /* with token_slots, at least 1 */
  int64_t num_token_slots;    /* with token_slots: first dimension of final_state and final_precond */
  const int32_t* accepted;    /* [N], with token_slots and without slots: sequence n starts from slot token_slots[n, accepted[n] - 1] (accepted[n] below 1:
                                 column 0) of initial_state and initial_precond, whose first dimension is num_token_slots too; below first_slot: it is
                                 skipped */
  int32_t first_slot;         /* slots below it are none: 0, or 1 for a server whose slot 0 is nobody's */
  int32_t skipped;            /* fw_skipped */
  const int32_t* final_slots; /* fw_forward, with slots: [N]: the final states of sequence n go to slot final_slots[n] of the pool instead (below first_slot:
                                 nowhere) */
  /* fw_forward, for caches of prefixes: copies of the states on the way, into the tensors checkpoints and precond_checkpoints of fw_outputs. Checkpoint i of
   * a sequence has the states after its first (i + 1) checkpoint_interval tokens; a sequence has as many as it has whole intervals. A forward that starts from
   * one gives the bits of the undisturbed one, unless sequences are cut (segment) or the checkpoint was rounded to bf16. */
  int64_t checkpoint_interval; /* tokens: a multiple of 64 and of the chunk; 0: none */
  /* [N, checkpoint_columns], memory of the device, read when the call runs: checkpoint i of sequence n goes to slot checkpoint_slots[n, i] (below first_slot:
   * nowhere). NULL: to place i + n floor(T / interval), of packed sequences i + floor(tokens before sequence n / interval): no two share one, and places that
   * are nobody's stay as they were. */
  const int32_t* checkpoint_slots;
  int64_t checkpoint_columns; /* with checkpoint_slots: at least the checkpoints of the longest sequence */
  int64_t num_checkpoints;    /* with checkpoint_slots: first dimension of the checkpoints. Else that is B floor(T / interval) */
} fw_desc;

/* Inputs; backward writes the gradients into a struct of the same type (tensors that are absent there are not computed).
 * Which are needed follows from the rule; one that the rule does not use must be absent. */
typedef struct fw_inputs {
  size_t size;
  fw_tensor q, k;            /* [B, T, H, K]; k: key_source GIVEN */
  fw_tensor v;               /* [B, T, HV, V] */
  fw_tensor g;               /* log-decay <= 0, or its logit (fw_gates; so of the other gates). scalar: [B, T, HV]; channel: [B, T, H or HV, K] */
  fw_tensor beta;            /* gain gate, [B, T, HV]; gains but one and nlms, where erase or write is tied */
  fw_tensor lambda;          /* query feedback LEARNED, [B, T, HV] */
  fw_tensor erase_key;       /* p, [B, T, H, K] */
  fw_tensor erase_gate;      /* [B, T, H or HV, K]; SCALAR: [B, T, HV] */
  fw_tensor write_gate;      /* [B, T, HV, V]; SCALAR: [B, T, HV] */
  fw_tensor read_correction; /* d of the corrected read, [B, T, HV] */
  fw_tensor precond_g;       /* log-decay of the preconditioner <= 0, [B, T, H] */
  fw_tensor precond_beta;    /* its gain, [B, T, H] */
  fw_tensor precond_center;  /* [H], rank 1; the squashed forms */
  fw_tensor initial_state;   /* [N, HV, K, V] or [N, HV, V, K], see state_layout; absent: zero */
  fw_tensor initial_precond; /* [N, H, K]; absent: zero */
  /* Of log-decays given as logits (fw_given), with the heads of g or precond_g. a_log: SOFTPLUS and LOWER_BOUND. */
  fw_tensor a_log;           /* [heads of g]; of a channel decay also [heads of g, K]; absent: zero */
  fw_tensor dt_bias;         /* [heads of g]; of a channel decay [heads of g, K]; absent: zero */
  fw_tensor precond_a_log;   /* [H]; absent: zero */
  fw_tensor precond_dt_bias; /* [H]; absent: zero */
  fw_tensor erase_write;     /* f of erase_write OWN, a tensor of tokens, [B, T, H, K] */
} fw_inputs;

/* Outputs; for backward the gradients with respect to them (absent: zero). */
typedef struct fw_outputs {
  size_t size;
  fw_tensor o;             /* [B, T, HV, V] */
  fw_tensor final_state;   /* like initial_state, may be absent; may be the same memory as initial_state */
  fw_tensor final_precond; /* [N, H, K], may be absent; may be the same memory as initial_precond */
  /* With checkpoint_interval, of fw_forward; may be absent. Like final_state and final_precond, another number of states; may be the same pool. */
  fw_tensor checkpoints, precond_checkpoints;
} fw_outputs;

typedef struct fw_sizes {
  size_t size;
  size_t forward;        /* bytes of workspace of fw_forward (without a saved buffer) and fw_step */
  size_t backward;       /* bytes of workspace of fw_backward with a saved buffer */
  size_t saved;          /* bytes that fw_forward can save for fw_backward */
  size_t backward_alone; /* bytes of workspace of fw_backward without a saved buffer */
  size_t forward_saving; /* bytes of workspace of fw_forward with a saved buffer: at most `forward` */
} fw_sizes;

/* Sets every field to zero or its default and the size field; type is one of the structs above. */
#define FW_INIT(pointer) fw_init_struct((pointer), sizeof(*(pointer)))
FW_API void fw_init_struct(void* pointer, size_t size);

/* Fills a contiguous tensor description: rank values of shape. */
FW_API fw_tensor fw_tensor_of(void* data, fw_dtype dtype, int rank, const int64_t* shape);

/* A named rule ("gated_deltanet2", ...). fw_rule_name gives the names in order, NULL past the last. */
FW_API fw_status fw_rule_preset(const char* name, fw_rule* rule);
FW_API const char* fw_rule_name(int index);

/* Workspace and saved sizes for a descriptor; a function of the descriptor and the number of threads. */
FW_API fw_status fw_workspace_query(const fw_desc* desc, fw_sizes* sizes);

/* FW_OK if calls with this device can run here; else FW_ERROR_DEVICE and what is supported as the message. */
FW_API fw_status fw_device_check(int32_t device);

/* What a descriptor's calls do, as text of lines: form, kernels, grids, bytes. Writes at most `bytes` with the final zero and returns the
 * length that is needed without it; 0 and fw_last_error() if the descriptor is wrong. Needs no device. */
FW_API size_t fw_plan_text(const fw_desc* desc, char* buffer, size_t bytes);

/* o and the final states, which may be the memory of the initial ones. saved (NULL with slots) (sizes.saved bytes, or NULL) keeps what backward would otherwise
 * recompute. workspace and saved: aligned to 64 bytes. */
FW_API fw_status fw_forward(const fw_desc* desc, const fw_inputs* in, const fw_outputs* out, void* saved, size_t saved_bytes, void* workspace,
                            size_t workspace_bytes);

/* Gradients of sum(o * d.o) + sum(final_state * d.final_state) + sum(final_precond * d.final_precond); overwrites what
 * `grads` names. saved: what fw_forward wrote for the same descriptor and inputs, or NULL (then it is recomputed). */
FW_API fw_status fw_backward(const fw_desc* desc, const fw_inputs* in, const fw_outputs* d, const fw_inputs* grads, const void* saved, size_t saved_bytes,
                             void* workspace, size_t workspace_bytes);

/* Decode: the token form whatever desc->form says, for one or a few tokens a sequence (T small). Give the same memory
 * as in->initial_state and out->final_state to update the state in place.
 * Slots and tokens that may be taken back: fw_desc.slots, token_slots. No two sequences may write one slot, or read one that another writes. */
FW_API fw_status fw_step(const fw_desc* desc, const fw_inputs* in, const fw_outputs* out, void* workspace, size_t workspace_bytes);

/* A descriptor that is checked and planned once, for many calls of its shape: a call through it plans nothing and asks the tensors alone. It keeps what
 * it needs of the descriptor (cu_seqlens too; slots stay the caller's memory) and runs on its stream. step: for fw_plan_step, else for the other two; any
 * number of threads may use it. fw_set_threads afterwards does not change what workspaces it asks for; a larger number has no effect on its calls. The calls
 * take what those without a plan take. */
typedef struct fw_plan fw_plan;
FW_API fw_status fw_plan_create(const fw_desc* desc, int step, fw_plan** plan);
FW_API void fw_plan_destroy(fw_plan* plan); /* NULL: nothing */
FW_API fw_status fw_plan_sizes(const fw_plan* plan, fw_sizes* sizes);
FW_API fw_status fw_plan_forward(const fw_plan* plan, const fw_inputs* in, const fw_outputs* out, void* saved, size_t saved_bytes, void* workspace,
                                 size_t workspace_bytes);
FW_API fw_status fw_plan_backward(const fw_plan* plan, const fw_inputs* in, const fw_outputs* d, const fw_inputs* grads, const void* saved, size_t saved_bytes,
                                  void* workspace, size_t workspace_bytes);
FW_API fw_status fw_plan_step(const fw_plan* plan, const fw_inputs* in, const fw_outputs* out, void* workspace, size_t workspace_bytes);

/* Message of the last call of this thread that did not return FW_OK; "" if none. Valid until the next call. */
FW_API const char* fw_last_error(void);

/* "0.1.0" */
FW_API const char* fw_version(void);

/* Threads of all later calls; 0 restores the default (OMP_NUM_THREADS or all cores). A call that has begun keeps its number, whichever thread sets another,
 * and a plan never uses more than there were when it was made. */
FW_API void fw_set_threads(int threads);
FW_API int fw_get_threads(void);

/* "AVX3", "AVX2", ...: the instruction set that the kernels run on here. */
FW_API const char* fw_simd_target(void);

#ifdef __cplusplus
}
#endif

#endif /* FASTWEIGHT_FASTWEIGHT_H_ */
