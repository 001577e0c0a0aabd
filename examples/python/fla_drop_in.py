"""A flash-linear-attention layer on fastweight's kernels: enable, call, count the calls that were served.

    python examples/python/fla_drop_in.py        # needs flash-linear-attention; runs on the CPU
"""

import fastweight.fla
import torch

fastweight.fla.enable()
from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: E402: any time, before or after enable()

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 100, 2, 32, requires_grad=True)
g, beta = -torch.rand(1, 100, 2), torch.rand(1, 100, 2)
o, state = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
o.sum().backward()
row = next(r for r in fastweight.fla.status() if r["function"] == "chunk_gated_delta_rule")
print(f"o {tuple(o.shape)}, state {tuple(state.shape)}, calls served: {row['served']}, passed on to FLA: {row['fell_back']}")
