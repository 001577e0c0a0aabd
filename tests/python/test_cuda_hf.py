"""transformers' models in small random configurations on a GPU: logits, gradients and greedy tokens with these kernels under
flash-linear-attention's names against transformers' own torch path in float32, beside which that path in bfloat16 says what rounding alone does. Skipped where there is no GPU or no flash-linear-attention."""

import contextlib
import unittest
from unittest import mock

import torch

if not torch.cuda.is_available():
    raise unittest.SkipTest("no GPU")

import fastweight.fla
import fastweight.hf
from fastweight.torch import _serving
from test_hf import MODELS, model_of, relative, torch_path  # raises SkipTest without transformers

try:
    import fla.ops  # noqa: F401
except Exception as error:
    raise unittest.SkipTest(f"flash-linear-attention is not there: {error}")

# Heads as these models have them in use.
HEADS = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 128, "linear_head_dim": 128, "hidden_size": 256}


def wide(kind):
    name, values = MODELS[kind]
    return name, {**values, **{key: value for key, value in HEADS.items() if key in values}}


class Models(unittest.TestCase):
    def setUp(self):
        patch = mock.patch.dict(MODELS, {kind: wide(kind) for kind in MODELS})
        patch.start()
        self.addCleanup(patch.stop)
        _serving.counts.clear()

    def served(self, run):
        fastweight.fla.enable()
        try:
            with mock.patch.dict("os.environ", {"FASTWEIGHT_STRICT": "1", "FASTWEIGHT_FP32": "1"}):
                found = run()
        finally:
            fastweight.fla.disable()
        self.assertGreater(sum(c.served for c in _serving.counts.values()), 0)
        return found

    def torch_path(self, run):
        """run() on transformers' own loops."""
        with contextlib.ExitStack() as until:
            until.addCleanup = until.callback
            for kind in MODELS:
                torch_path(until, kind)
            return run()

    def test_float32_is_the_torch_path(self):
        ids = torch.randint(2, 96, (2, 130), generator=torch.Generator().manual_seed(1)).cuda()

        def run(kind, dtype=torch.float32):
            model = model_of(kind, dtype).cuda()
            out = model(input_ids=ids, labels=ids, use_cache=False)
            out.loss.backward()
            with torch.no_grad():
                tokens = model.eval().generate(ids[:, :70], attention_mask=torch.ones_like(ids[:, :70]), max_new_tokens=24, do_sample=False)
            return out.logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), tokens

        for kind in MODELS:
            expected = self.torch_path(lambda: run(kind))
            for dtype in (torch.float32, torch.bfloat16):
                found = self.served(lambda: run(kind, dtype))
                own = self.torch_path(lambda: run(kind, dtype))
                errors = [relative(a, b) for a, b in zip(found[:2], expected)]
                theirs = [relative(a, b) for a, b in zip(own[:2], expected)]
                equal = float((found[2] == expected[2]).float().mean())
                print(f"{kind} {dtype}: logits, gradients against the torch path in float32: {errors}, the torch path's own {theirs}; greedy tokens that are equal: {equal:.2f}")
                with self.subTest(model=kind, dtype=dtype):
                    for a, b in zip(errors, theirs):
                        self.assertLessEqual(a, 1e-4 if dtype is torch.float32 else max(1e-2, 1.1 * b))
                    if dtype is torch.float32:
                        self.assertTrue(torch.equal(found[2], expected[2]))


if __name__ == "__main__":
    unittest.main()
