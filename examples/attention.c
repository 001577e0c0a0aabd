/* The recurrence from C: a Gated DeltaNet layer's attention forward, backward and decode through fastweight.h.
 *
 *     cc attention.c $(pkg-config --cflags --libs fastweight) -lm -o attention && ./attention
 *
 * Shows the order of calls: rule, descriptor, workspace query, forward (keeping what backward needs), backward. Then
 * the same sequence again token by token with the state updated in place, as a generating program would do it. It
 * checks what must hold: the steps give the outputs of the forward pass, and the gradient predicts how the loss
 * changes. */
#include <fastweight/fastweight.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { B = 1, T = 100, H = 2, HV = 4, K = 32, V = 48 };
enum { QK_COUNT = B * T * H * K, V_COUNT = B * T * HV * V, GATE_COUNT = B * T * HV, STATE_COUNT = B * HV * K * V };

static float q[QK_COUNT], k[QK_COUNT], v[V_COUNT], g[GATE_COUNT], beta[GATE_COUNT];
static float o[V_COUNT], o_moved[V_COUNT], d_o[V_COUNT], state[STATE_COUNT], final_state[STATE_COUNT];
static float dq[QK_COUNT], dk[QK_COUNT], dv[V_COUNT], dg[GATE_COUNT], dbeta[GATE_COUNT];

static void require(fw_status status, const char* what) {
  if (status == FW_OK) return;
  fprintf(stderr, "attention: %s: %s: %s\n", what, fw_status_name(status), fw_last_error());
  exit(1);
}

/* Uniform in [-1, 1), the same numbers on every system. */
static float uniform(void) {
  static uint32_t bits = 12345;
  bits = bits * 1664525u + 1013904223u;
  return (float)(bits >> 8) / 8388608.0f - 1.0f;
}

/* Memory for a workspace or a saved buffer. */
static void* allocated(size_t bytes) {
  void* memory = fw_alloc(bytes);
  if (memory == NULL) require(FW_ERROR_MEMORY, "fw_alloc");
  return memory;
}

static fw_tensor tensor3(float* data, int64_t tokens) {
  const int64_t shape[3] = {B, tokens, HV};
  return fw_tensor_of(data, FW_F32, 3, shape);
}

static fw_tensor tensor4(float* data, int64_t tokens, int64_t heads, int64_t dim) {
  const int64_t shape[4] = {B, tokens, heads, dim};
  return fw_tensor_of(data, FW_F32, 4, shape);
}

static fw_tensor state_tensor(float* data) {
  const int64_t shape[4] = {B, HV, K, V};
  return fw_tensor_of(data, FW_F32, 4, shape);
}

/* `tokens` tokens of the sequence, from token t on. B is 1, so they lie one after the other. */
static fw_inputs inputs_from(int64_t t, int64_t tokens) {
  fw_inputs in;
  fw_inputs_init(&in);
  in.q = tensor4(q + t * H * K, tokens, H, K);
  in.k = tensor4(k + t * H * K, tokens, H, K);
  in.v = tensor4(v + t * HV * V, tokens, HV, V);
  in.g = tensor3(g + t * HV, tokens);
  in.beta = tensor3(beta + t * HV, tokens);
  return in;
}

static double loss(const float* out) {
  double sum = 0;
  int i;
  for (i = 0; i < V_COUNT; ++i) sum += (double)out[i] * d_o[i];
  return sum;
}

int main(void) {
  fw_desc desc;
  fw_sizes sizes;
  fw_inputs in, grads;
  fw_outputs out, d_out;
  void *workspace, *saved;
  size_t workspace_bytes;
  double predicted = 0, measured, before, worst = 0, largest = 0;
  const float step = 1e-3f;
  int i, t;

  for (i = 0; i < QK_COUNT; ++i) q[i] = uniform();
  for (i = 0; i < QK_COUNT; ++i) k[i] = uniform();
  for (i = 0; i < V_COUNT; ++i) v[i] = uniform();
  for (i = 0; i < V_COUNT; ++i) d_o[i] = uniform();
  for (i = 0; i < GATE_COUNT; ++i) g[i] = -0.05f * (1.0f + uniform());  /* log-decay, <= 0 */
  for (i = 0; i < GATE_COUNT; ++i) beta[i] = 0.5f * (1.0f + uniform()); /* in [0, 1) */

  fw_desc_init(&desc);
  require(fw_rule_parse("gated_deltanet", &desc.rule), "fw_rule_parse");
  desc.dtype = FW_F32;
  desc.form = FW_FORM_CHUNK;
  desc.B = B;
  desc.T = T;
  desc.H = H;
  desc.HV = HV;
  desc.K = K;
  desc.V = V;

  fw_sizes_init(&sizes);
  require(fw_workspace_query(&desc, &sizes), "fw_workspace_query");
  workspace_bytes = sizes.forward > sizes.backward ? sizes.forward : sizes.backward;
  workspace = allocated(workspace_bytes);
  saved = allocated(sizes.saved);

  /* Forward by chunks, from a zero state. */
  in = inputs_from(0, T);
  fw_outputs_init(&out);
  out.o = tensor4(o, T, HV, V);
  out.final_state = state_tensor(final_state);
  require(fw_forward(&desc, &in, &out, saved, sizes.saved, workspace, workspace_bytes), "fw_forward");

  /* Gradients of sum(o * d_o). */
  fw_outputs_init(&d_out);
  d_out.o = tensor4(d_o, T, HV, V);
  fw_inputs_init(&grads);
  grads.q = tensor4(dq, T, H, K);
  grads.k = tensor4(dk, T, H, K);
  grads.v = tensor4(dv, T, HV, V);
  grads.g = tensor3(dg, T);
  grads.beta = tensor3(dbeta, T);
  require(fw_backward(&desc, &in, &d_out, &grads, saved, sizes.saved, workspace, workspace_bytes), "fw_backward");

  /* Decode: the same tokens one by one, the state updated in place. */
  desc.T = 1;
  fw_sizes_init(&sizes);
  require(fw_workspace_query(&desc, &sizes), "fw_workspace_query of a step");
  if (sizes.forward > workspace_bytes) {
    fw_free(workspace);
    workspace_bytes = sizes.forward;
    workspace = allocated(workspace_bytes);
  }
  memset(state, 0, sizeof(state));
  for (t = 0; t < T; ++t) {
    float o_token[HV * V];
    in = inputs_from(t, 1);
    in.initial_state = state_tensor(state);
    fw_outputs_init(&out);
    out.o = tensor4(o_token, 1, HV, V);
    out.final_state = state_tensor(state);
    require(fw_step(&desc, &in, &out, workspace, workspace_bytes), "fw_step");
    for (i = 0; i < HV * V; ++i) {
      const double expected = o[t * HV * V + i];
      worst = fmax(worst, fabs(o_token[i] - expected));
      largest = fmax(largest, fabs(expected));
    }
  }
  for (i = 0; i < STATE_COUNT; ++i) worst = fmax(worst, fabs((double)state[i] - final_state[i]));
  printf("fastweight %s on %s: %d tokens by chunks and one by one agree to %.1e (largest output %.2f)\n", fw_version(),
         fw_simd_target(), (int)T, worst, largest);

  /* Move every input a little along its gradient's sign: the loss must change as the gradient says. */
  before = loss(o);
  for (i = 0; i < QK_COUNT; ++i) {
    q[i] += dq[i] > 0 ? step : -step;
    k[i] += dk[i] > 0 ? step : -step;
    predicted += step * (fabs((double)dq[i]) + fabs((double)dk[i]));
  }
  for (i = 0; i < V_COUNT; ++i) {
    v[i] += dv[i] > 0 ? step : -step;
    predicted += step * fabs((double)dv[i]);
  }
  for (i = 0; i < GATE_COUNT; ++i) {
    /* g must stay <= 0 and beta in [0, 1]: these two move downhill where they may, by a smaller step. */
    const float small = 0.01f * step;
    g[i] -= small;
    beta[i] += small;
    predicted += small * ((double)dbeta[i] - dg[i]);
  }
  desc.T = T;
  in = inputs_from(0, T);
  fw_outputs_init(&out);
  out.o = tensor4(o_moved, T, HV, V);
  fw_sizes_init(&sizes);
  require(fw_workspace_query(&desc, &sizes), "fw_workspace_query");
  require(fw_forward(&desc, &in, &out, NULL, 0, workspace, workspace_bytes), "fw_forward of the moved inputs");
  measured = loss(o_moved) - before;
  printf("moving the inputs by %g along their gradients changes the loss by %.4f, predicted %.4f\n", step, measured,
         predicted);

  fw_free(workspace);
  fw_free(saved);
  if (!(worst <= 1e-4 * largest)) {
    fprintf(stderr, "attention: the steps differ from the forward pass by %g\n", worst);
    return 1;
  }
  if (!(fabs(measured - predicted) <= 0.05 * fabs(predicted))) {
    fprintf(stderr, "attention: the loss changed by %g where the gradient says %g\n", measured, predicted);
    return 1;
  }
  return 0;
}
