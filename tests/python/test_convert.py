"""Models of flash-linear-attention saved in shards, imported and exported: what the program generates of them beside what they say themselves (fla_models.py)."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).parent


@unittest.skipUnless(os.environ.get("FASTWEIGHT_PROGRAM"), "FASTWEIGHT_PROGRAM names no program")
@unittest.skipUnless(all(importlib.util.find_spec(name) for name in ("fla", "transformers", "triton")), "flash-linear-attention is not there")
class Models(unittest.TestCase):
    def test_every_type_generates_the_same_greedy_tokens_here_and_comes_back_as_it_was(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, HERE / "fla_models.py", folder], capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        self.assertEqual(len(rows), 16, done.stderr[-2000:])
        for row in rows:
            with self.subTest(model=row["model"]):
                self.assertNotIn("error", row)
                self.assertGreater(row["shards"], 1)
                self.assertEqual(row["ids"], row["theirs"])
                self.assertGreater(len(set(row["ids"])), 5)  # not one token again and again, which many a wrong model would say too
                self.assertLess(row["logprobs"], 1e-3)
                self.assertEqual(row["again"], 0)


if __name__ == "__main__":
    unittest.main()
