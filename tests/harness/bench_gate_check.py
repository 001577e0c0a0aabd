"""tools/bench_gate.py: bench_gate_check.py TOOLS_FOLDER"""

import copy
import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, sys.argv.pop(1) if len(sys.argv) > 1 else str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
sys.dont_write_bytecode = True
import bench_gate  # noqa: E402

RUN = {"recurrence": {"shape": {"B": 4, "T": 4096, "H": 16, "HV": 16, "K": 128, "V": 128},
                      "results": [{"rule": "kda", "forward_ms": {"median": 1.0, "best": 0.9}, "decode_us": {"1": 4.0, "64": 40.0}}]},
       "results": [{"model": "kda", "shape": "8x2048", "ktok_s": 70.0}]}


class BenchGate(unittest.TestCase):
    def run_gate(self, old: dict, new: dict, *options: str) -> int:
        with tempfile.TemporaryDirectory() as folder:
            paths = [pathlib.Path(folder) / name for name in ("old.json", "new.json")]
            for path, run in zip(paths, (old, new), strict=True):
                path.write_text(json.dumps(run), encoding="utf-8")
            return bench_gate.main([*map(str, paths), *options])

    def changed(self, forward: float = 1.0, rate: float = 70.0) -> dict:
        run = copy.deepcopy(RUN)
        run["recurrence"]["results"][0]["forward_ms"]["median"] = forward
        run["results"][0]["ktok_s"] = rate
        return run

    def test_rows_have_names(self):
        self.assertEqual(set(bench_gate.rows(RUN)), {"4x4096x16,K128,V128 kda forward_ms", "4x4096x16,K128,V128 kda decode_us 1",
                                                     "4x4096x16,K128,V128 kda decode_us 64", "kda 8x2048 ktok_s"})

    def test_equal_and_faster_runs_are_accepted(self):
        self.assertEqual(self.run_gate(RUN, RUN), 0)
        self.assertEqual(self.run_gate(RUN, self.changed(forward=0.5, rate=140.0)), 0)
        self.assertEqual(self.run_gate(RUN, self.changed(forward=1.029)), 0)

    def test_slower_times_and_rates_are_refused(self):
        self.assertEqual(self.run_gate(RUN, self.changed(forward=1.04)), 1)
        self.assertEqual(self.run_gate(RUN, self.changed(rate=67.0)), 1)
        self.assertEqual(self.run_gate(RUN, self.changed(forward=1.04), "--limit", "5"), 0)

    def test_only_named_rows_count(self):
        self.assertEqual(self.run_gate(RUN, self.changed(forward=2.0), "--rows", "ktok_s,decode"), 0)
        self.assertEqual(self.run_gate(RUN, RUN, "--rows", "no such row"), 2)

    def test_a_missing_row_is_refused(self):
        new = self.changed()
        del new["results"]
        self.assertEqual(self.run_gate(RUN, new), 1)


if __name__ == "__main__":
    unittest.main()
