// Multi-query associative recall: pairs of key and value, then queries for them (synthetic.h has the interface).
#pragma once

#include <memory>

#include "tasks/synthetic.h"

namespace fw {

// Kaczmarz Linear Attention's experiments. Keys and values are drawn with replacement from the halves of the
// vocabulary. All that follows the pairs is noise of the whole vocabulary. Each key is put at a place x of it with a
// density of x^-0.1. Later keys overwrite earlier ones. Throws Error(kUsage): length >= 2 pairs + 3, vocab_size even,
// at least 2.
std::unique_ptr<SyntheticTask> kaczmarz_mqar(const TaskOptions& options);

// Zoology (Arora et al. 2023): `pairs` distinct keys and values, shown `passes` times, then each key once at an even
// distance after them. The distances are drawn without replacement with weights i^(power - 1) in the order of the
// pairs. Token 0 is no key and fills the rest unless `noise`. Throws Error(kUsage): length even, 2 pairs (passes + 1)
// <= length, pairs < vocab_size / 2, vocab_size even, power > 0.
std::unique_ptr<SyntheticTask> zoology_mqar(const TaskOptions& options);

}  // namespace fw
