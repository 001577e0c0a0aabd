"""fastweight.hf: transformers' models in small random configurations on the CPU, with these functions in place of transformers' own torch path."""

import importlib
import os
import unittest
from unittest import mock

import torch

import fastweight.hf
from fastweight.torch import _serving

try:
    import transformers
except Exception as error:
    raise unittest.SkipTest(f"transformers is not there: {error}")
if not hasattr(importlib.import_module("transformers.integrations.hub_kernels"), fastweight.hf._CHOOSER):
    raise unittest.SkipTest(f"transformers {transformers.__version__} asks for no functions of flash-linear-attention (5.23 does)")

LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
COMMON = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
          "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False, **LAYERS}
GDN = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4}
# Every expert is chosen: which are is a jump, and a difference of rounding that crosses it is not one of these kernels.
MODELS = {
    "qwen3_next": ("Qwen3Next", {**COMMON, **GDN, "head_dim": 16, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                 "shared_expert_intermediate_size": 32}),
    "olmo_hybrid": ("OlmoHybrid", {**COMMON, **GDN, "linear_num_key_heads": 4}),
    "kimi_linear": ("KimiLinear", {**COMMON, "linear_head_dim": 16, "linear_num_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                                   "v_head_dim": 16, "moe_intermediate_size": 32, "num_local_experts": 2, "num_experts_per_tok": 2}),
}


def model_of(kind, dtype=torch.float32):
    name, values = MODELS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**values))
    for name, parameter in model.named_parameters():  # they begin almost without a signal
        if parameter.dim() > 1 and "conv" not in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.to(dtype)


def torch_path(test, kind):
    """transformers' own loops in torch, whether FLA is installed or not."""
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    for attributes in fastweight.hf._NAMES.values():
        for attribute in attributes:
            found = getattr(module, attribute, None)
            if found is not None:
                patch = mock.patch.object(module, attribute, getattr(found, "__wrapped__", found))
                patch.start()
                test.addCleanup(patch.stop)


def relative(found, expected):
    found, expected = found.double(), expected.double()
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp_min(1e-12))


class Models(unittest.TestCase):
    def both(self, kind, run):
        """What run() gives with transformers' torch path and with these kernels, all calls of which must have been served."""
        model_of(kind)  # its file is imported
        torch_path(self, kind)
        expected = run()
        _serving.counts.clear()
        with mock.patch.dict("os.environ", {"FASTWEIGHT_STRICT": "1"}):
            fastweight.hf.enable()
            try:
                found = run()
            finally:
                fastweight.hf.disable()
        self.assertGreater(sum(c.served for c in _serving.counts.values()), 0)
        self.assertGreater(_serving.counts["causal_conv1d_fn"].served, 0)
        self.assertEqual(sum(c.fell_back for c in _serving.counts.values()), 0)
        return found, expected

    def test_logits_and_gradients(self):
        ids = torch.randint(2, 96, (2, 70), generator=torch.Generator().manual_seed(1))

        def run(kind, dtype, of=None):
            model = model_of(kind, of or dtype).to(dtype)
            out = model(input_ids=ids, labels=ids, use_cache=False)
            out.loss.backward()
            return out.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

        def errors(found, expected):
            (logits, gradients), (wanted_logits, wanted) = found, expected
            self.assertEqual(set(gradients), set(wanted))
            return relative(logits, wanted_logits), relative(torch.cat([gradients[n].flatten() for n in wanted]), torch.cat([g.flatten() for g in wanted.values()]))

        for kind in MODELS:
            found, expected = self.both(kind, lambda: run(kind, torch.float32))
            with self.subTest(model=kind, dtype=torch.float32):
                self.assertLessEqual(max(errors(found, expected)), 1e-5)
            # With the same weights: not further from float32 than the torch path in bfloat16, which rounds more often.
            exact = run(kind, torch.float32, torch.bfloat16)
            found, expected = self.both(kind, lambda: run(kind, torch.bfloat16))
            with self.subTest(model=kind, dtype=torch.bfloat16):
                for here, there in zip(errors(found, exact), errors(expected, exact)):
                    self.assertLessEqual(here, 1.1 * there)

    def test_packed_texts_stay_apart(self):
        lengths = (30, 1, 41)
        texts = [torch.randint(2, 96, (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths]
        offsets = torch.tensor([0, 30, 31, 72], dtype=torch.int32)
        packed = {"input_ids": torch.cat(texts, 1), "position_ids": torch.cat([torch.arange(n) for n in lengths])[None], "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets,
                  "max_length_q": 41, "max_length_k": 41, "seq_idx": torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))[None]}
        for kind in MODELS:
            model = model_of(kind).eval()
            with self.subTest(model=kind), torch.no_grad(), mock.patch.dict("os.environ", {"FASTWEIGHT_STRICT": "1"}):
                fastweight.hf.enable()
                self.addCleanup(fastweight.hf.disable)
                found = model(**packed, use_cache=False).logits
                alone = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in texts], 1)
                self.assertLessEqual(relative(found, alone), 1e-5)

    def test_convolution_that_is_not_served(self):
        x, weight, bias = torch.randn(2, 6, 9), torch.randn(6, 4), torch.randn(6)
        served = fastweight.hf._causal_conv1d_fn
        expected = torch.nn.functional.silu(torch.nn.functional.conv1d(x, weight[:, None], bias, padding=3, groups=6)[..., :9])
        self.assertLessEqual(relative(served(x, weight, bias, activation="silu"), expected), 1e-6)
        for problem, values in (("activation", {"activation": None}), ("seq_idx", {"activation": "silu", "seq_idx": torch.zeros(2, 9)}),
                                ("initial_states", {"activation": "silu", "initial_states": torch.zeros(2, 6, 3)}),
                                ("return_final_states", {"activation": "silu", "return_final_states": True})):
            with self.assertRaisesRegex(_serving.NotServed, problem):
                served(x, weight, bias, **values)

    def test_greedy_tokens_are_equal(self):
        ids = torch.randint(2, 96, (2, 9), generator=torch.Generator().manual_seed(2))
        for kind in MODELS:
            run = lambda: model_of(kind).eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
            found, expected = self.both(kind, run)
            with self.subTest(model=kind):
                self.assertEqual(found.shape, (2, 33))
                self.assertTrue(torch.equal(found, expected))
                self.assertGreater(_serving.counts["fused_recurrent_kda" if "kimi" in kind else "fused_recurrent_gated_delta_rule"].served, 0)

    @unittest.skipIf("FASTWEIGHT_SHORT_TESTS" in os.environ, "the newest torch runs them")
    def test_loss_curves_of_200_steps(self):
        generator = torch.Generator().manual_seed(3)
        start = torch.randint(2, 96, (200, 4, 1), generator=generator)
        texts = 2 + (start + torch.arange(24) * torch.randint(1, 4, (200, 4, 1), generator=generator)) % 94  # numbers that rise by 1 to 3

        def run(kind, nudge=0.0):
            model = model_of(kind)
            generator = torch.Generator().manual_seed(4)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + nudge * torch.randn(parameter.shape, generator=generator))
            # Gradients that are zero but for rounding (a row of the embedding that ends a text) must not be made steps of full size.
            optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5)
            losses = []
            for ids in texts:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(float(loss.detach()))
            return torch.tensor(losses)

        for kind in MODELS:
            found, expected = self.both(kind, lambda: run(kind))
            nudged = run(kind, 1e-7)
            with self.subTest(model=kind):
                self.assertLess(float(found[-20:].mean()), 0.7 * float(found[:5].mean()))  # it learns
                self.assertLess(float((found - expected)[:10].abs().max()), 1e-3)  # before roundings have grown
                # Training lets roundings grow (a thousandfold in 40 steps of qwen3_next), and which they are changes with the machine. How far the torch path
                # comes from its own curve when every parameter begins one rounding away is what these kernels may differ by, and never more than the
                # noise: what two batches that follow each other differ by.
                noise = float(expected.diff()[100:].std() / 2**0.5)
                own = float((nudged - expected).abs().mean())
                self.assertLess(float((found - expected).abs().mean()), min(3 * own, noise))
                self.assertLess(abs(float((found - expected)[-50:].mean())), noise)


class Switching(unittest.TestCase):
    def test_files_imported_before_and_after_are_reached_and_all_is_put_back(self):
        import transformers.models.qwen3_next.modeling_qwen3_next as before

        name = "transformers.models.qwen3_5.modeling_qwen3_5"
        plain = before.torch_chunk_gated_delta_rule
        fastweight.hf.enable()
        fastweight.hf.enable()  # twice is once
        try:
            after = importlib.import_module(name)
            for module in (before, after):
                self.assertEqual(module.torch_chunk_gated_delta_rule.fastweight, "chunk_gated_delta_rule")
            self.assertIn("qwen3_next", next(row for row in fastweight.hf.status() if row["function"] == "chunk_gated_delta_rule")["files"])
            self.assertIn("qwen3_next", str(fastweight.hf.status()))
        finally:
            fastweight.hf.disable()
        self.assertIs(before.torch_chunk_gated_delta_rule, plain)
        self.assertFalse(hasattr(after.torch_chunk_gated_delta_rule, "fastweight"))
        self.assertTrue(all(row["files"] == [] for row in fastweight.hf.status()))

    def test_the_environment_can_keep_it_off(self):
        with mock.patch.dict("os.environ", {"HF_FASTWEIGHT": "0"}):
            self.assertTrue(all(row["files"] == [] for row in fastweight.hf.enable()))


if __name__ == "__main__":
    unittest.main()
