// The channel gradients that make log-decays and gates of their logits, and gradients of these (FormedGates): online rules without a preconditioner.
#include "scan/cuda/gradients/channel/kernel.cuh"
#include "scan/cuda/gradients/launchers.h"

namespace fw::cuda {
namespace {

template <int kKey, bool kGates>
void launch_formed(const GradientArgs& args, int64_t chunks, void* stream) {
  if (args.head_sums != nullptr) {
    launch_channel_gradients<ChannelShape<kKey, true, true, kGates, RowM::kNone, false, true, false, true>>(args, chunks, stream);
  } else {
    launch_channel_gradients<ChannelShape<kKey, true, true, kGates, RowM::kNone, false, true, false, false>>(args, chunks, stream);
  }
}

}  // namespace

void gradients_formed(const GradientArgs& args, const GradientChoice& choice, int key, int64_t chunks, void* stream) {
  if (choice.gates) return launch_formed<128, true>(args, chunks, stream);  // gradients_form_gates()
  key == 128 ? launch_formed<128, false>(args, chunks, stream) : launch_formed<64, false>(args, chunks, stream);
}

}  // namespace fw::cuda
