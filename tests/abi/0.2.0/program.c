/* A program for the header of fastweight 0.2.0: every call of that version, on the CPU. It is compiled with the frozen
 * header and linked with the library of today. */
#include <fastweight/fastweight.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if FW_VERSION_MAJOR != 0 || FW_VERSION_MINOR != 2 || FW_VERSION_PATCH != 0
#error "expected the frozen header of 0.2.0"
#endif

enum { T = 37, H = 1, HV = 2, K = 8, V = 12, SLOTS = 5, INTERVAL = 64 };

static float q[INTERVAL * H * K], k[INTERVAL * H * K], v[INTERVAL * HV * V], g[INTERVAL * HV], beta[INTERVAL * HV];
static float o[INTERVAL * HV * V], o_plan[T * HV * V], o_step[INTERVAL * HV * V], d_o[T * HV * V];
static float dq[T * H * K], dk[T * H * K], dv[T * HV * V], dg[T * HV], dbeta[T * HV], dq_plan[T * H * K];
static float state[HV * K * V], final_state[HV * K * V], pool[SLOTS * HV * K * V], checkpoints[2 * HV * K * V];

static void require(int holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "program of 0.2.0: %s: %s\n", what, fw_last_error());
  exit(1);
}

static float uniform(void) {
  static uint32_t bits = 2029;
  bits = bits * 1664525u + 1013904223u;
  return (float)(bits >> 8) / 8388608.0f - 1.0f;
}

static fw_tensor tensor4(float* data, int64_t tokens, int64_t heads, int64_t dim) {
  int64_t shape[4];
  shape[0] = 1, shape[1] = tokens, shape[2] = heads, shape[3] = dim;
  return fw_tensor_of(data, FW_F32, 4, shape);
}

static fw_tensor tensor3(float* data, int64_t tokens) {
  int64_t shape[3];
  shape[0] = 1, shape[1] = tokens, shape[2] = HV;
  return fw_tensor_of(data, FW_F32, 3, shape);
}

static fw_tensor states(float* data, int64_t count) {
  int64_t shape[4];
  shape[0] = count, shape[1] = HV, shape[2] = K, shape[3] = V;
  return fw_tensor_of(data, FW_F32, 4, shape);
}

static fw_inputs inputs(int64_t t, int64_t tokens) {
  fw_inputs in;
  fw_inputs_init(&in);
  in.q = tensor4(q + t * H * K, tokens, H, K);
  in.k = tensor4(k + t * H * K, tokens, H, K);
  in.v = tensor4(v + t * HV * V, tokens, HV, V);
  in.g = tensor3(g + t * HV, tokens);
  in.beta = tensor3(beta + t * HV, tokens);
  return in;
}

static fw_desc descriptor(int64_t tokens) {
  fw_desc desc;
  fw_desc_init(&desc);
  require(fw_rule_parse("gated_deltanet gain_bound=2", &desc.rule) == FW_OK, "fw_rule_parse");
  desc.B = 1, desc.T = tokens, desc.H = H, desc.HV = HV, desc.K = K, desc.V = V;
  return desc;
}

static double difference(const float* a, const float* b, int count) {
  double most = 0;
  int i;
  for (i = 0; i < count; ++i) most = fmax(most, fabs((double)a[i] - b[i]));
  return most;
}

static void structs_are_the_callers(void) {
  struct {
    fw_desc desc;
    unsigned char behind[64];
  } guarded;
  fw_sizes sizes;
  fw_rule rule;
  size_t i;
  memset(&guarded, 0xa5, sizeof(guarded));
  fw_desc_init(&guarded.desc);
  for (i = 0; i < sizeof(guarded.behind); ++i)
    require(guarded.behind[i] == 0xa5, "fw_desc_init wrote behind the caller's struct");
  require(guarded.desc.size == sizeof(fw_desc), "fw_desc.size");
  require(guarded.desc.rule.size == sizeof(fw_rule), "fw_desc.rule.size");
  require(guarded.desc.dtype == FW_F32 && guarded.desc.seqlens.bits == 64 && guarded.desc.device_number == -1,
          "the defaults of fw_desc");
  require(guarded.desc.gates.divisor == 16 && guarded.desc.gates.lower_bound == -5, "the defaults of fw_gates");
  fw_rule_init(&rule);
  require(memcmp(&rule, &guarded.desc.rule, sizeof(rule)) == 0, "fw_rule_init");
  fw_sizes_init(&sizes);
  require(fw_workspace_query(&guarded.desc, &sizes) == FW_ERROR_ARGUMENT, "a descriptor without shapes");
  require(strstr(fw_last_error(), "H: expected 1 to") != NULL, "the message of a descriptor without shapes");
  require(strcmp(fw_status_name(FW_ERROR_ARGUMENT), "FW_ERROR_ARGUMENT") == 0, "fw_status_name");
}

static void rules_are_texts(void) {
  fw_rule rule, again;
  char text[512];
  int count = 0;
  for (; fw_rule_name(count) != NULL; ++count) {
    require(fw_rule_preset(fw_rule_name(count), &rule) == FW_OK, "fw_rule_preset");
    require(fw_rule_format(&rule, text, sizeof(text)) < sizeof(text), "fw_rule_format");
    require(fw_rule_parse(text, &again) == FW_OK, "fw_rule_parse of fw_rule_format");
    require(memcmp(&rule, &again, sizeof(rule)) == 0, "a rule written and read");
  }
  require(count >= 28, "the presets of 0.2.0");
}

/* Whole sequences, gradients, plans and single tokens agree. */
static void calls(void) {
  fw_desc desc = descriptor(T), one = descriptor(1);
  fw_sizes sizes, planned, step;
  fw_inputs in = inputs(0, T), grads;
  fw_outputs out, d;
  fw_plan *plan = NULL, *stepper = NULL;
  void *workspace, *saved;
  char text[4096];
  size_t bytes;
  int t;
  fw_sizes_init(&sizes);
  fw_sizes_init(&planned);
  fw_sizes_init(&step);
  require(fw_workspace_query(&desc, &sizes) == FW_OK, "fw_workspace_query");
  require(fw_workspace_query(&one, &step) == FW_OK, "fw_workspace_query of a step");
  require(sizes.size == sizeof(fw_sizes) && sizes.forward_saving <= sizes.forward && sizes.saved > 0, "fw_sizes");
  require(fw_plan_text(&desc, text, sizeof(text)) > 0, "fw_plan_text");
  bytes = sizes.forward > sizes.backward_alone ? sizes.forward : sizes.backward_alone;
  if (step.forward > bytes) bytes = step.forward;
  workspace = fw_alloc(bytes);
  saved = fw_alloc(sizes.saved);
  require(workspace != NULL && saved != NULL && (uintptr_t)workspace % FW_ALIGNMENT == 0, "fw_alloc");

  fw_outputs_init(&out);
  out.o = tensor4(o, T, HV, V);
  out.final_state = states(final_state, 1);
  require(fw_forward(&desc, &in, &out, saved, sizes.saved, workspace, bytes) == FW_OK, "fw_forward");
  fw_outputs_init(&d);
  d.o = tensor4(d_o, T, HV, V);
  fw_inputs_init(&grads);
  grads.q = tensor4(dq, T, H, K);
  grads.k = tensor4(dk, T, H, K);
  grads.v = tensor4(dv, T, HV, V);
  grads.g = tensor3(dg, T);
  grads.beta = tensor3(dbeta, T);
  require(fw_backward(&desc, &in, &d, &grads, saved, sizes.saved, workspace, bytes) == FW_OK, "fw_backward");

  require(fw_plan_create(&desc, 0, &plan) == FW_OK, "fw_plan_create");
  require(fw_plan_sizes(plan, &planned) == FW_OK && memcmp(&planned, &sizes, sizeof(sizes)) == 0, "fw_plan_sizes");
  out.o = tensor4(o_plan, T, HV, V);
  require(fw_plan_forward(plan, &in, &out, NULL, 0, workspace, bytes) == FW_OK, "fw_plan_forward");
  require(difference(o, o_plan, T * HV * V) == 0, "fw_plan_forward differs from fw_forward");
  grads.q = tensor4(dq_plan, T, H, K);
  require(fw_plan_backward(plan, &in, &d, &grads, NULL, 0, workspace, bytes) == FW_OK, "fw_plan_backward");
  require(difference(dq, dq_plan, T * H * K) < 1e-4, "fw_plan_backward differs from fw_backward");
  fw_plan_destroy(plan);

  require(fw_plan_create(&one, 1, &stepper) == FW_OK, "fw_plan_create of a step");
  for (t = 0; t < T; ++t) {
    in = inputs(t, 1);
    in.initial_state = states(state, 1);
    out.o = tensor4(o_step + t * HV * V, 1, HV, V);
    out.final_state = states(state, 1);
    if (t % 2 == 0) {
      require(fw_step(&one, &in, &out, workspace, bytes) == FW_OK, "fw_step");
    } else {
      require(fw_plan_step(stepper, &in, &out, workspace, bytes) == FW_OK, "fw_plan_step");
    }
  }
  fw_plan_destroy(stepper);
  require(difference(o, o_step, T * HV * V) < 1e-4, "fw_step differs from fw_forward");
  require(difference(state, final_state, HV * K * V) < 1e-4, "the state of fw_step differs from fw_forward's");
  fw_free(saved);
  fw_free(workspace);
}

/* Packed sequences, a pool of states, speculative tokens and checkpoints: the structs inside fw_desc. */
static void structs_inside(void) {
  const int64_t offsets[3] = {0, 20, T};
  const int32_t slots[2] = {3, 1}, token_slots[2] = {1, 2}, accepted[1] = {1}, slot[1] = {1};
  fw_desc desc = descriptor(T);
  fw_sizes sizes;
  fw_inputs in = inputs(0, T);
  fw_outputs out;
  void* workspace;
  fw_sizes_init(&sizes);
  fw_outputs_init(&out);
  desc.seqlens.cu_seqlens = offsets;
  desc.seqlens.num_sequences = 2;
  desc.state_pool.slots = slots;
  desc.state_pool.num_slots = SLOTS;
  desc.state_pool.first_slot = 1;
  require(fw_workspace_query(&desc, &sizes) == FW_OK, "packed sequences");
  workspace = fw_alloc(sizes.forward);
  in.initial_state = states(pool, SLOTS);
  out.final_state = states(pool, SLOTS);
  out.o = tensor4(o, T, HV, V);
  require(fw_forward(&desc, &in, &out, NULL, 0, workspace, sizes.forward) == FW_OK, "fw_forward with a pool");
  require(pool[3 * HV * K * V] != 0 && pool[HV * K * V] != 0 && pool[2 * HV * K * V] == 0, "the slots of the pool");
  fw_free(workspace);

  desc = descriptor(2);
  desc.speculation.token_slots = token_slots;
  desc.speculation.columns = 2;
  desc.speculation.num_slots = SLOTS;
  desc.speculation.accepted = accepted;
  desc.state_pool.skipped = FW_SKIPPED_ZERO;
  require(fw_workspace_query(&desc, &sizes) == FW_OK, "speculative tokens");
  workspace = fw_alloc(sizes.forward);
  in = inputs(0, 2);
  in.initial_state = states(pool, SLOTS);
  out.final_state = states(pool, SLOTS);
  out.o = tensor4(o, 2, HV, V);
  require(fw_step(&desc, &in, &out, workspace, sizes.forward) == FW_OK, "fw_step with speculation");
  require(pool[2 * HV * K * V] != 0, "the state after the second token");
  fw_free(workspace);

  desc = descriptor(INTERVAL);
  desc.checkpoints.interval = INTERVAL;
  desc.checkpoints.slots = slot;
  desc.checkpoints.columns = 1;
  desc.checkpoints.num_slots = 2;
  require(fw_workspace_query(&desc, &sizes) == FW_OK, "checkpoints");
  workspace = fw_alloc(sizes.forward);
  in = inputs(0, INTERVAL);
  fw_outputs_init(&out);
  out.o = tensor4(o, INTERVAL, HV, V);
  out.final_state = states(final_state, 1);
  out.checkpoints = states(checkpoints, 2);
  require(fw_forward(&desc, &in, &out, NULL, 0, workspace, sizes.forward) == FW_OK, "fw_forward with checkpoints");
  require(difference(checkpoints + HV * K * V, final_state, HV * K * V) == 0,
          "the checkpoint at the end is the final state");
  fw_free(workspace);
}

int main(void) {
  int i, major = 0, minor = 0;
  for (i = 0; i < INTERVAL * H * K; ++i) q[i] = uniform(), k[i] = uniform();
  for (i = 0; i < INTERVAL * HV * V; ++i) v[i] = uniform();
  for (i = 0; i < T * HV * V; ++i) d_o[i] = uniform();
  for (i = 0; i < INTERVAL * HV; ++i) g[i] = -0.05f * (1.0f + uniform()), beta[i] = 0.5f * (1.0f + uniform());
  require(sscanf(fw_version(), "%d.%d", &major, &minor) == 2 && major == FW_VERSION_MAJOR && minor >= FW_VERSION_MINOR,
          "fw_version");
  require(fw_device_check(FW_DEVICE_CPU) == FW_OK, "fw_device_check");
  require(strlen(fw_simd_target()) > 0, "fw_simd_target");
  fw_set_threads(1);
  require(fw_get_threads() == 1, "fw_get_threads");
  structs_are_the_callers();
  rules_are_texts();
  calls();
  structs_inside();
  printf("program of 0.2.0: runs with libfastweight %s\n", fw_version());
  return 0;
}
