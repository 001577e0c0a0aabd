// A build without CUDA: calls with FW_DEVICE_CUDA say so.
#include "scan/cuda/scan.h"

#include "gpu/device.h"
#include "scan/cuda/kernels.h"
#include "scan/cuda/require_device.h"
#include "scan/cuda/rewrites/erase_over_decay.h"
#include "scan/cuda/rewrites/gate_kernels.h"
#include "scan/cuda/rewrites/key_from_decay.h"
#include "scan/cuda/rewrites/split_k.h"
#include "scan/cuda/rewrites/staged_rows_kernels.h"
#include "scan/cuda/rewrites/two_token_kernels.h"

namespace fw::cuda {

void require_device(bool) { require_gpu(); }

void scan_forward(const Plan&, const DevicePlan&, const Inputs<float>&, const CallForms&, const Outputs<float>&, void*,
                  void*) {
  require_device(false);
}
void scan_backward(const Plan&, const DevicePlan&, const Inputs<float>&, const CallForms&, const Outputs<float>&,
                   const Inputs<float>&, const void*, void*) {
  require_device(false);
}

void fold_ring(const Plan&, const Inputs<float>&, const Outputs<float>&) { require_device(false); }

void make_key_from_decay(const Plan&, const TokenTensor<float>&, const TokenTensor<float>&) { require_device(false); }
void add_key_from_decay(const Plan&, const TokenTensor<float>&, const TokenTensor<float>&, const TokenTensor<float>&) {
  require_device(false);
}

void divide_erase_gate(const Plan&, const EraseOverDecayArgs&) { require_device(false); }
void divide_erase_gate_backward(const Plan&, const EraseOverDecayArgs&) { require_device(false); }

void add_split_k_rows(const Plan&, const DevicePlan&, const CommonRegions&, const Inputs<float>&, void*,
                      const TokenTensor<float>&, void*) {
  require_device(false);
}

void expand_rows(const ExpandArgs&, const RowTokens&, void*) { require_device(false); }
void reduce_rows(const ReduceRowsArgs&, const RowTokens&, void*) { require_device(false); }

void stage_rows(const StageArgs&, const StageTokens&, void*) { require_device(false); }
void unstage_rows(const StageArgs&, const StageTokens&, void*) { require_device(false); }

void gate_values(const GateValuesArgs&, const GateTokens&, void*) { require_device(false); }
void gate_gradients(const GateGradientsArgs&, const GateTokens&, void*) { require_device(false); }

int sm_count() { return kUsualSmCount; }

}  // namespace fw::cuda
