"""check=True and FASTWEIGHT_CHECK=1: values that a rule does not take; and messages of calls whose tensors have heads in front of tokens."""

import math
import os
import subprocess
import sys
import unittest

import torch

from fastweight import Error
from fastweight.torch import forward, step


class Checks(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(2)
        self.q, self.k, self.v = torch.randn(3, 1, 6, 2, 8)
        self.g, self.beta = -torch.rand(1, 6, 2), torch.rand(1, 6, 2)

    def call(self, rule="gated_deltanet", check=True, **changes):
        given = {"q": self.q, "k": self.k, "v": self.v, "g": self.g, "beta": self.beta, **changes}
        return forward(rule, check=check, **given)

    def test_values_that_a_rule_does_not_take(self):
        nan, late = self.v.clone(), self.q.clone()
        nan[0, 3, 1, 2], late[0, 5, 0, 0] = math.nan, math.inf
        for pattern, changes in (
            ("g: expected log-decays, at most 0, got 0\\.5; pass the logarithm of a decay", {"g": torch.full((1, 6, 2), 0.5)}),
            ("beta: expected values from 0 to 1, .* got 1\\.5; gain_bound=2 in the rule", {"beta": self.beta.clone().fill_(1.5)}),
            ("beta: expected values from 0 to 1, .* got -0\\.5", {"beta": self.beta.clone().fill_(-0.5)}),
            ("v: expected finite numbers, got nan", {"v": nan}),
            ("q: expected finite numbers, got inf", {"q": late}),
            ("k: expected torch.float32, as q has it, got torch.bfloat16", {"k": self.k.bfloat16()}),
        ):
            with self.subTest(pattern=pattern):
                with self.assertRaisesRegex(Error, pattern):
                    self.call(**changes)
                self.call(check=False, **changes)
        self.call()
        self.call("gated_deltanet gain_bound=2", beta=self.beta + 1)
        self.call("kaczmarz", beta=self.beta + 5)
        self.call(gates="g=softplus beta=sigmoid", g=self.g + 3, beta=self.beta - 3)

    def test_steps(self):
        with self.assertRaisesRegex(Error, "g: expected log-decays"):
            step("gated_deltanet", self.q, self.k, self.v, torch.zeros(1, 2, 8, 8), g=-self.g, beta=self.beta, check=True)

    def test_environment(self):
        code = "import torch\nfrom fastweight.torch import forward\nforward('gated_deltanet', *torch.randn(3, 1, 6, 2, 8), g=torch.ones(1, 6, 2), beta=torch.rand(1, 6, 2))"
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "FASTWEIGHT_CHECK": "1"}, capture_output=True, text=True)
        self.assertIn("g: expected log-decays, at most 0, got 1", done.stderr)

    def test_a_layout_with_heads_in_front_is_recognised(self):
        turned = {name: getattr(self, name).transpose(1, 2) for name in ("q", "k", "v")}
        with self.assertRaisesRegex(Error, "q looks like \\[B, H, T, K\\]; expected \\[B, T, H, K\\]"):
            self.call(check=False, **turned)
        with self.assertRaisesRegex(Error, "k looks like \\[B, H, T, K\\]; expected \\[B, T, H, K\\]: k.transpose\\(1, 2\\)"):
            self.call(check=False, k=turned["k"])
        with self.assertRaisesRegex(Error, "g looks like \\[B, H, T\\]; expected \\[B, T, H\\]"):
            self.call(check=False, g=self.g.transpose(1, 2))
        with self.assertRaises(Error) as caught:  # nothing is turned
            self.call(check=False, beta=self.beta[:, :5])
        self.assertNotIn("looks like", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
