// Embedding: rows out, sums of rows back, in the order of the tokens.
#include "op_check.h"
#include "ops/ops.h"

namespace fw::testing {
namespace {

struct EmbeddingOp {
  int64_t vocab, cols;
  std::vector<int32_t> ids;
  int64_t rows() const { return static_cast<int64_t>(ids.size()); }

  Values<double> inputs(Random& random) const { return {random_values(random, vocab * cols)}; }
  std::vector<bool> accumulates() const { return {true}; }
  Values<double> formula(const Values<double>& in) const {
    std::vector<double> out;
    for (int32_t id : ids) out.insert(out.end(), in[0].begin() + id * cols, in[0].begin() + (id + 1) * cols);
    return {out};
  }
  template <class T>
  Values<T> forward(const Values<T>& in) const {
    const Strided<T> weight(vocab, cols, in[0]);
    Strided<T> out(rows(), cols);
    host_ops<T>().embedding_forward(host_exec<T>(), ids.data(), weight.view(), out.mat());
    return {out.values()};
  }
  template <class T>
  Values<T> backward(const Values<T>&, const Values<T>& douts, const Values<T>& before) const {
    const Strided<T> dout(rows(), cols, douts[0]);
    Strided<T> dweight(vocab, cols, before[0]);
    host_ops<T>().embedding_backward(host_exec<T>(), ids.data(), dout.view(), dweight.mat());
    return {dweight.values()};
  }
};

TEST(Embedding, ValuesAndGradients) {
  for (int64_t cols : {1, 7, 24, 65})
    check_op(EmbeddingOp{5, cols, {4, 0, 0, 3, 4, 0}}, "embedding " + std::to_string(cols));
  check_op(EmbeddingOp{5, 7, {}}, "embedding of nothing");
}

TEST(Embedding, BitsDoNotDependOnThreads) {
  Random random(1);
  std::vector<int32_t> ids(3000);
  for (int32_t& id : ids) id = static_cast<int32_t>(random.below(50));
  check_threads(EmbeddingOp{50, 200, ids}, "embedding");
}

}  // namespace
}  // namespace fw::testing
