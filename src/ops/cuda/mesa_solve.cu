// The regularised least squares of a Mesa layer on the device (ops.def). The kernel here goes token by token. H =
// exp(g) H + beta k k^T in double. Then (H + Diag(lambda)) x = rhs is solved by Cholesky or by conjugate gradients. A
// block has a head of a sequence. Lower triangles lie in shared memory, row by row: H in one, and in another the matrix
// that is taken apart. Its last row is the right-hand side, which is solved forward as the columns are made.
// Conjugate gradients of bf16 sequences go in chunks where takes_mesa_chunks() says so (scratch.h, mesa_chunks.cuh).
#include <cmath>
#include <type_traits>

#include "base/arena_mark.h"
#include "base/error.h"
#include "ops/cuda/elementwise.cuh"
#include "ops/cuda/kinds.h"
#include "ops/cuda/math.cuh"
#include "ops/cuda/mesa_chunks.cuh"

namespace fw::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMostKey = kinds::kMostMesaKey;

constexpr int triangle(int i) { return i * (i + 1) / 2; }

struct SolveMemory {
  double *h, *a;                       // triangles of K and of K + 1 rows
  double *diagonal, *key, *x, *r, *p;  // [K]
  double* sums;                        // [kWarps]
  FW_DEVICE SolveMemory(char* shared, int K) {
    double* at = reinterpret_cast<double*>(shared);
    const auto take = [&](int n) {
      double* part = at;
      at += n;
      return part;
    };
    h = take(triangle(K)), a = take(triangle(K + 1));
    diagonal = take(K), key = take(K), x = take(K), r = take(K), p = take(K);
    sums = take(kWarps);
  }
  static size_t bytes(int64_t K) {
    return sizeof(double) *
           static_cast<size_t>(triangle(static_cast<int>(K)) + triangle(static_cast<int>(K) + 1) + 5 * K + kWarps);
  }
};

FW_DEVICE double warp_sum_double(double x) {
  FW_UNROLL for (int mask = 16; mask > 0; mask /= 2) {
    x += move_double(x, [&](uint32_t word) { return shuffle_xor(word, mask); });
  }
  return x;
}

// a.b over K numbers, by all threads.
FW_DEVICE double block_dot(const SolveMemory& m, const double* a, const double* b, int K) {
  double sum = 0;
  for (int i = static_cast<int>(thread_index()); i < K; i += kThreads) sum += a[i] * b[i];
  sum = warp_sum_double(sum);
  sync_threads();
  if (lane_index() == 0) m.sums[warp_index()] = sum;
  sync_threads();
  double all = 0;
  FW_UNROLL for (int w = 0; w < kWarps; ++w) all += m.sums[w];
  return all;
}

// The triangle a of H + Diag(lambda), under it the right-hand side: x. Afterwards x is there for all threads.
FW_DEVICE void by_cholesky(const SolveMemory& m, int K) {
  const int thread = static_cast<int>(thread_index()), lane = static_cast<int>(lane_index()),
            warp = static_cast<int>(warp_index());
  for (int c = 0; c < K; ++c) {
    sync_threads();
    const double root = sqrt(m.a[triangle(c) + c]);
    for (int i = c + 1 + thread; i <= K; i += kThreads) m.a[triangle(i) + c] /= root;
    sync_threads();
    if (thread == 0) m.a[triangle(c) + c] = root;  // read again only after the next barrier
    for (int i = c + 1 + warp; i <= K; i += kWarps) {
      const double of_row = m.a[triangle(i) + c];
      for (int j = c + 1 + lane; j <= i && j < K; j += 32) m.a[triangle(i) + j] -= of_row * m.a[triangle(j) + c];
    }
  }
  sync_threads();
  if (warp == 0) {
    double* z = m.a + triangle(K);
    for (int c = K - 1; c >= 0; --c) {
      const double* row = m.a + triangle(c);
      const double value = z[c] / row[c];
      sync_warp();
      for (int j = lane; j < c; j += 32) z[j] -= row[j] * value;
      if (lane == 0) m.x[c] = value;
      sync_warp();
    }
  }
  sync_threads();
}

// From x = 0 until the residual is at most `tolerance` of the right-hand side, or `steps` steps are done.
FW_DEVICE void by_conjugate_gradients(const SolveMemory& m, int K, int64_t steps, double tolerance) {
  const int thread = static_cast<int>(thread_index()), lane = static_cast<int>(lane_index()),
            warp = static_cast<int>(warp_index());
  sync_threads();
  for (int i = thread; i < K; i += kThreads) m.x[i] = 0, m.r[i] = m.p[i] = m.a[triangle(K) + i];
  double square = block_dot(m, m.r, m.r, K);
  const double enough = tolerance * tolerance * square;
  double* const ap = m.key;  // the key is in H by now
  for (int64_t step = 0; step < steps && square > enough; ++step) {
    sync_threads();
    for (int i = warp; i < K; i += kWarps) {
      double sum = 0;
      for (int j = lane; j < K; j += 32) sum += m.a[j <= i ? triangle(i) + j : triangle(j) + i] * m.p[j];
      sum = warp_sum_double(sum);
      if (lane == 0) ap[i] = sum;
    }
    sync_threads();
    const double along = square / block_dot(m, m.p, ap, K);
    for (int i = thread; i < K; i += kThreads) {
      m.x[i] += along * m.p[i];
      m.r[i] -= along * ap[i];
    }
    const double next = block_dot(m, m.r, m.r, K);
    for (int i = thread; i < K; i += kThreads) m.p[i] = m.r[i] + next / square * m.p[i];
    square = next;
  }
  sync_threads();
}

template <class T>
__global__ void __launch_bounds__(kThreads) mesa_solve_kernel(const MesaArgs<T> a) {
  const int K = static_cast<int>(a.shape.key_dim), thread = static_cast<int>(thread_index()),
            lane = static_cast<int>(lane_index());
  const int64_t task = block_index_x(), n = task / a.shape.heads, head = task % a.shape.heads, first = head * K,
                width = a.shape.value_dim + K;
  const SolveMemory m(shared_memory(), K);
  for (int i = thread; i < K; i += kThreads) {
    const double x = a.lambda[first + i];
    m.diagonal[i] = fmax(x, 0.0) + log1p(exp(-fabs(x))) + a.shape.least;
  }
  const auto for_triangle = [&](const auto& body) {
    for (int i = static_cast<int>(warp_index()); i < K; i += kWarps) {
      for (int j = lane; j <= i; j += 32) body(i, j, triangle(i) + j);
    }
  };
  for_triangle([&](int i, int j, int at) {
    m.h[at] = a.state == nullptr ? 0.0 : double{a.state[(task * K + i) * width + a.shape.value_dim + j]};
  });
  for (int64_t t = a.sequences.offsets[n]; t < a.sequences.offsets[n + 1]; ++t) {
    sync_threads();  // x has been stored, the key may be written
    for (int i = thread; i < K; i += kThreads) {
      m.key[i] = number(a.k.data[t * a.k.stride + first + i]);
      m.a[triangle(K) + i] = number(a.rhs.data[t * a.rhs.stride + first + i]);
    }
    sync_threads();
    const double decay = exp(double{a.g.data[t * a.g.stride + head]}),
                 gain = number(a.beta.data[t * a.beta.stride + head]);
    for_triangle([&](int i, int j, int at) {
      const double h = decay * m.h[at] + gain * m.key[i] * m.key[j];
      m.h[at] = h;
      m.a[at] = i == j ? h + m.diagonal[i] : h;
    });
    if (a.shape.cg_steps > 0) {
      by_conjugate_gradients(m, K, a.shape.cg_steps, a.shape.cg_tolerance);
    } else {
      by_cholesky(m, K);
    }
    for (int i = thread; i < K; i += kThreads)
      a.x.data[t * a.x.stride + first + i] = stored<T>(static_cast<float>(m.x[i]));
  }
}

// in: x, y;  the sum of -sigmoid(lambda) x y
struct LambdaBackward {
  const float* lambda;
  template <int N>
  struct Slopes {
    float of[N];
  };
  template <int N>
  FW_DEVICE Slopes<N> columns(int64_t c) const {
    Slopes<N> s;
    FW_UNROLL for (int k = 0; k < N; ++k) s.of[k] = -sigmoid(lambda[c + k]);
    return s;
  }
  template <int N, int I, int O>
  FW_DEVICE void operator()(const Slopes<N>& s, int64_t, const float (&in)[I][N], float (&)[O][N],
                            float (&sums)[1][N]) const {
    FW_UNROLL for (int k = 0; k < N; ++k) sums[0][k] += s.of[k] * (in[0][k] * in[1][k]);
  }
};

}  // namespace

namespace ops {

template <class T>
void mesa_solve(const Exec<T>& exec, const MesaShape& shape, Mat<const T> rhs, Mat<const T> k, Mat<const T> beta,
                Mat<const Wide<T>> g, const Wide<T>* lambda, const PassLayout& layout, const Wide<T>* state, Mat<T> x) {
  if (shape.key_dim > kMostKey)
    fail_usage("mesa: expected key heads of at most {} channels on CUDA, got {}", kMostKey, shape.key_dim);
  if (x.rows == 0) return;
  const MesaArgs<T> args{shape, rhs, k, beta, g, lambda, PassSequences(layout), state, x};
  if constexpr (std::is_same_v<T, Bf16>) {
    if (takes_mesa_chunks(shape, rhs, k, x)) {
      const ArenaMark mark(exec.arena);
      Bf16* const states = cuda::mesa_scratch(exec.arena, shape, x.rows, layout.host.count());
      cuda::mesa_states(args, states, exec.device.stream());
      return mesa_chunks(args, states, exec.device.stream());
    }
  }
  launch(mesa_solve_kernel<T>, Dim3{static_cast<unsigned>(layout.host.count() * shape.heads)}, kThreads,
         SolveMemory::bytes(shape.key_dim), exec.device.stream(), args);
}

template <class T>
void mesa_lambda_backward(const Exec<T>& exec, Mat<const T> x, Mat<const T> y, const Wide<T>* lambda,
                          Wide<T>* dlambda) {
  elementwise_sums<1, 4>(exec, LambdaBackward{lambda}, x.rows, x.cols, operands(x, y), operands(),
                         [&](const float* partial, int64_t blocks) {
                           add_column_sums(partial, blocks, x.cols, dlambda, exec.device.stream());
                         });
}

#define FW_INSTANTIATE(T)                                                                                 \
  template void mesa_solve<T>(const Exec<T>&, const MesaShape&, Mat<const T>, Mat<const T>, Mat<const T>, \
                              Mat<const float>, const float*, const PassLayout&, const float*, Mat<T>);   \
  template void mesa_lambda_backward<T>(const Exec<T>&, Mat<const T>, Mat<const T>, const float*, float*);
FW_INSTANTIATE(float)
FW_INSTANTIATE(Bf16)
#undef FW_INSTANTIATE

}  // namespace ops
}  // namespace fw::cuda
