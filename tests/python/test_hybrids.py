"""Hybrids of transformers: imported and exported again, transformers gives the logits that it gave before."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

MODELS = pathlib.Path(__file__).resolve().parent.parent / "conformance/models"
PROGRAM = os.environ.get("FASTWEIGHT_PROGRAM")


def run_its_own_code(case, model):
    """Until the end of the test case transformers' functions run, not those of another library."""
    module = sys.modules[type(model).__module__]
    for name in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "causal_conv1d_fn"):
        original = getattr(module, name, None)
        if original is None:
            continue
        setattr(module, name, getattr(original, "__wrapped__", original))
        case.addCleanup(setattr, module, name, original)


@unittest.skipUnless(PROGRAM, "FASTWEIGHT_PROGRAM names no program")
@unittest.skipUnless(importlib.util.find_spec("transformers"), "transformers is not there")
class Hybrids(unittest.TestCase):
    def logits(self, folder, ids):
        import torch
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        run_its_own_code(self, model)
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    def test_an_exported_folder_has_the_logits_of_the_original(self):
        from safetensors.torch import load_file

        for name in ("qwen3_5", "olmo_hybrid", "qwen3_next", "qwen3_5_moe", "kimi_linear"):
            with self.subTest(model=name), tempfile.TemporaryDirectory() as folder:
                ours, theirs = f"{folder}/ours", f"{folder}/theirs"
                subprocess.run([PROGRAM, "import", MODELS / name, ours], check=True, capture_output=True)
                subprocess.run([PROGRAM, "export", ours, theirs], check=True, capture_output=True)
                io = load_file(MODELS / name / "io.safetensors")
                expected, got = io["logits"], self.logits(theirs, io["input_ids"].long())
                self.assertLess(float((got - expected).norm() / expected.norm()), 2e-5)


if __name__ == "__main__":
    unittest.main()
