"""The recurrences under the names and signatures of flash-linear-attention (FLA).

    >>> from fastweight.torch.ops import chunk_gated_delta_rule  # in place of: from fla.ops.gated_delta_rule import ...

q, k are [B, T, H, K], v is [B, T, HV, V]. The functions return (o, final_state), the precond_* forms also the
preconditioner's state; final states are None unless output_final_state. A call that these kernels do not serve goes to
FLA's function; with FASTWEIGHT_STRICT=1 it raises (_serving.py).

A caller can see these differences: fused_recurrent_* forms have gradients, H may divide HV everywhere, and gates are
not copied. FASTWEIGHT_GAIN_BOUND=2 says that step sizes and erase gates given as values may reach 2.

Gates given as logits (use_gate_in_kernel, use_beta_sigmoid_in_kernel) are fused into the kernels where the device's
kernels take logits. Elsewhere torch applies the activation in float32 before the call (_common.py).
"""

from fastweight.torch.ops._delta import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    chunk_kda,
    fused_recurrent_kda,
    chunk_delta_rule,
    fused_recurrent_delta_rule,
    chunk_gdn2,
    fused_recurrent_gdn2,
)
from fastweight.torch.ops._linear import (
    chunk_gla,
    fused_recurrent_gla,
    chunk_simple_gla,
    fused_recurrent_simple_gla,
    chunk_retention,
    fused_recurrent_retention,
)
from fastweight.torch.ops._comba import (
    chunk_comba,
    fused_recurrent_comba,
)
from fastweight.torch.ops._precond import (
    chunk_precond_gated_delta_rule,
    fused_recurrent_precond_gated_delta_rule,
    chunk_precond_kda,
    fused_recurrent_precond_kda,
)

__all__ = [
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_kda",
    "chunk_delta_rule",
    "fused_recurrent_delta_rule",
    "chunk_gdn2",
    "fused_recurrent_gdn2",
    "chunk_gla",
    "fused_recurrent_gla",
    "chunk_simple_gla",
    "fused_recurrent_simple_gla",
    "chunk_retention",
    "fused_recurrent_retention",
    "chunk_comba",
    "fused_recurrent_comba",
    "chunk_precond_gated_delta_rule",
    "fused_recurrent_precond_gated_delta_rule",
    "chunk_precond_kda",
    "fused_recurrent_precond_kda",
]


def __dir__() -> list[str]:
    return list(__all__)
