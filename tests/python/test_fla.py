"""fastweight.fla: an installed flash-linear-attention with these kernels under it. On the CPU its own kernels do not run, so what comes back was served."""

import unittest

import torch

import fastweight.fla
from fastweight.torch import _serving, ops
from reference import random_inputs, recurrence

try:
    import fla.ops
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # imported before enable(), as a model's file does
    from fla.ops.simple_gla import chunk_simple_gla
except Exception as error:
    raise unittest.SkipTest(f"flash-linear-attention is not there: {error}")

B, T, H, K, V = 2, 21, 2, 16, 16


def values(rule, T=T):
    return {name: x.float() for name, x in random_inputs(rule, B, T, H, H, K, V).items()}


class Fla(unittest.TestCase):
    def setUp(self):
        _serving.counts.clear()
        fastweight.fla.enable()
        self.addCleanup(fastweight.fla.disable)

    def agree(self, out, rule, n, what):
        expected = recurrence(rule, {name: x.double() for name, x in n.items()})[0]
        self.assertLess(float((out[0] - expected).abs().max()), 1e-5, what)
        self.assertEqual(_serving.counts[what].served, 1, what)
        self.assertEqual(_serving.counts[what].fell_back, 0, what)

    def test_every_function_is_reached(self):
        for row in fastweight.fla.status():
            self.assertIn(row["by"], ("registry", "module"), row)
        self.assertIn("chunk_kda", str(fastweight.fla.status()))

    def test_whole_operations(self):
        from fla.ops.comba import chunk_comba, fused_recurrent_comba
        from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        from fla.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2
        from fla.ops.gla import chunk_gla, fused_recurrent_gla
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
        from fla.ops.precond_gated_delta_rule import chunk_precond_gated_delta_rule, fused_recurrent_precond_gated_delta_rule
        from fla.ops.precond_kda import chunk_precond_kda, fused_recurrent_precond_kda
        from fla.ops.retention import chunk_retention, fused_recurrent_retention
        from fla.ops.simple_gla import fused_recurrent_simple_gla

        l2 = {"use_qk_l2norm_in_kernel": True}
        n = values("gated_deltanet")
        self.agree(chunk_gated_delta_rule(**n, **l2), "gated_deltanet", n, "chunk_gated_delta_rule")
        self.agree(fused_recurrent_gated_delta_rule(**n, **l2), "gated_deltanet", n, "fused_recurrent_gated_delta_rule")
        n = values("kda")
        self.agree(chunk_kda(**n, **l2), "kda", n, "chunk_kda")
        self.agree(fused_recurrent_kda(**n, **l2), "kda", n, "fused_recurrent_kda")
        n = values("deltanet")
        bf16 = {name: x.bfloat16() for name, x in n.items()}  # their chunk form refuses float32
        out = chunk_delta_rule(**bf16, **l2)
        self.assertEqual((out[0].dtype, _serving.counts["chunk_delta_rule"].served), (torch.bfloat16, 1))
        self.agree(fused_recurrent_delta_rule(**n, **l2), "deltanet", n, "fused_recurrent_delta_rule")
        n = values("gated_deltanet2")
        positional = [n[name] for name in ("q", "k", "v", "g", "erase_gate", "write_gate")]
        self.agree(chunk_gdn2(*positional, **l2), "gated_deltanet2", n, "chunk_gdn2")
        self.agree(fused_recurrent_gdn2(*positional, **l2), "gated_deltanet2", n, "fused_recurrent_gdn2")
        n = values("gla")
        self.agree(chunk_gla(**n), "gla", n, "chunk_gla")
        self.agree(fused_recurrent_gla(n["q"], n["k"], n["v"], gk=n["g"]), "gla", n, "fused_recurrent_gla")
        n = values("mamba2")
        self.agree(chunk_simple_gla(**n), "mamba2", n, "chunk_simple_gla")
        self.agree(fused_recurrent_simple_gla(**n), "mamba2", n, "fused_recurrent_simple_gla")
        del n["g"]
        _serving.counts.clear()
        self.agree(chunk_retention(**n), "retnet", n, "chunk_simple_gla")
        self.agree(fused_recurrent_retention(**n), "retnet", n, "fused_recurrent_simple_gla")
        rule = "decay=scalar gain=gate erase_key=own erase_state=previous q_norm=l2 k_norm=l2"
        n = values(rule)
        named = {**n, "p": n["erase_key"]}
        del named["erase_key"]
        self.agree(chunk_comba(**named, **l2), rule, n, "chunk_comba")
        self.agree(fused_recurrent_comba(**named, **l2), rule, n, "fused_recurrent_comba")
        for rule, chunk, recurrent in (("precond_gated_deltanet", chunk_precond_gated_delta_rule, fused_recurrent_precond_gated_delta_rule),
                                       ("precond_kda", chunk_precond_kda, fused_recurrent_precond_kda)):
            n = values(rule)
            call = {"g_atk": n["precond_g"], "g": n["g"], "beta_atk": n["precond_beta"], "beta": n["beta"], "log_atk_scale": n["precond_center"]}
            for function in (chunk, recurrent):
                self.agree(function(n["q"], n["k"], n["v"], **call), rule, n, function.__name__)

    def test_gradients_pass_through(self):
        n = {name: x.requires_grad_() for name, x in values("gated_deltanet").items()}
        found = torch.autograd.grad(chunk_gated_delta_rule(**n, use_qk_l2norm_in_kernel=True)[0].sum(), list(n.values()))
        exact = {name: x.detach().double().requires_grad_() for name, x in n.items()}
        expected = torch.autograd.grad(recurrence("gated_deltanet", exact)[0].sum(), list(exact.values()))
        for a, b in zip(found, expected):
            self.assertLess(float((a - b).abs().max()), 1e-4)

    def test_what_is_not_served_is_counted_with_its_reason_and_strict_raises_it(self):
        n = values("gla")
        from unittest import mock

        with mock.patch.dict("os.environ", {"FASTWEIGHT_STRICT": "1"}), self.assertRaisesRegex(_serving.NotServed, "gv: not served"):
            fla.ops.fused_recurrent_gla(n["q"], n["k"], n["v"], gv=n["v"])
        row = next(row for row in fastweight.fla.status() if row["function"] == "fused_recurrent_gla")
        self.assertEqual((row["served"], row["fell_back"]), (0, 1))
        self.assertIn("gv: not served, got Tensor", row["reasons"])

    def test_disable_puts_everything_back(self):
        from fla.ops.delta_rule import chunk as module

        self.assertIsInstance(module.ChunkDeltaRuleFunction, fastweight.fla._Replacement)
        fastweight.fla.disable()
        self.assertTrue(issubclass(module.ChunkDeltaRuleFunction, torch.autograd.Function))
        self.assertTrue(all(row["by"] == "off" for row in fastweight.fla.status()))
        n = values("gated_deltanet")
        with self.assertRaises(Exception):  # their kernels need a GPU
            chunk_gated_delta_rule(**n)
        self.assertEqual(_serving.counts["chunk_gated_delta_rule"].served, 0)
        self.assertIsNotNone(ops.chunk_gated_delta_rule(**n))


if __name__ == "__main__":
    unittest.main()
