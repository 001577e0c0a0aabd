"""Shards imported by the program, the doctor, the bench."""

import contextlib
import io
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

import fastweight
from fastweight import convert


def read(file):
    """{name: (dtype, shape, bytes)} of a safetensors file."""
    data = pathlib.Path(file).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    body = data[8 + size :]
    return {n: (t["dtype"], t["shape"], body[slice(*t["data_offsets"])]) for n, t in json.loads(data[8 : 8 + size]).items() if n != "__metadata__"}


def write(file, tensors):
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    pathlib.Path(file).write_bytes(struct.pack("<Q", len(text)) + text + body)


def split(tensors, folder):
    """Writes them as two shards with their index."""
    names = list(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        write(folder / file, {name: tensors[name] for name in part})
    weights = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


class Shards(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    @unittest.skipUnless(os.environ.get("FASTWEIGHT_PROGRAM"), "FASTWEIGHT_PROGRAM names no program")
    def test_a_sharded_folder_is_imported_as_the_whole_one_is_and_exported_again(self):
        models = pathlib.Path(__file__).parents[1] / "conformance/models"
        theirs = self.folder / "theirs"
        convert.export_model(models / "precond_gated_deltanet", theirs, tokenizer="ids")
        whole, shards = self.folder / "whole", self.folder / "shards"
        convert.import_model(theirs, whole)
        shards.mkdir()
        (shards / "config.json").write_bytes((theirs / "config.json").read_bytes())
        split(read(theirs / "model.safetensors"), shards)
        convert.import_model(shards, self.folder / "joined")
        self.assertEqual(read(whole / "model.safetensors"), read(self.folder / "joined/model.safetensors"))
        self.assertEqual([p.name for p in self.folder.iterdir() if p.name.startswith(".")], [])
        convert.export_model(self.folder / "joined", self.folder / "again")
        self.assertEqual(read(theirs / "model.safetensors"), read(self.folder / "again/model.safetensors"))
        with self.assertRaisesRegex(fastweight.Error, "import: "):
            convert.import_model(self.folder / "nothing", self.folder / "x")


class Tools(unittest.TestCase):
    def test_doctor_says_what_works(self):
        done = subprocess.run([sys.executable, "-W", "ignore", "-m", "fastweight.doctor"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn(f"fastweight    {fastweight.version()}", done.stdout)
        self.assertIn("selftest      cpu: passed", done.stdout)

    def test_a_run_of_other_peoples_tests_that_was_cut_short_tells_what_it_reached(self):
        def test(name, outcome, served, **more):
            return {"test": f"ops/test_a.py::{name}", "outcome": outcome, "seconds": 0.5, "served": served, "fell_back": 0, "reasons": {}, **more}

        parts = [
            [{"collected": {"ops/test_a.py": 5, "ops/test_b.py": 1}}, {"began": "ops/test_a.py::one"}, test("one", "passed", 2), {"began": "ops/test_a.py::two"}],
            [{"began": "ops/test_a.py::three"}, test("three", "failed", 1, reason="o differs"),
             test("four", "passed", 0, fell_back=1, reasons={"gv: not served": 1}), test("one", "passed", 2)],  # the same once more counts once
        ]
        with tempfile.TemporaryDirectory() as folder:
            for i, lines in enumerate(parts):
                pathlib.Path(folder, f"part{i}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"test": "half a li')
            table = subprocess.run([sys.executable, "-m", "fastweight.fla_report", folder], capture_output=True, text=True, check=True).stdout
            self.assertIn("| ops/test_a.py | 5 | 2 | 1 | 0 | 2 | 3 | 1 | 1 x gv: not served |", table)
            self.assertIn("| ops/test_b.py | 1 | 0 | 0 | 0 | 1 | 0 | 0 |  |", table)
            self.assertIn("failed: ops/test_a.py::three (served 1, left 0, 0.5 s)\n    o differs", table)
            self.assertIn("began and did not end: ops/test_a.py::two", table)
            self.assertNotIn("did not end: ops/test_a.py::one", table)
        self.assertEqual(subprocess.run([sys.executable, "-m", "fastweight.fla_report"], capture_output=True, check=False).returncode, 1)

    def test_bench_measures_and_keeps_the_numbers(self):
        from fastweight import bench

        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
            status = bench.main(["--device", "cpu", "--tokens", "20", "--heads", "1", "--dim", "16", "--rounds", "1", "--json", f"{folder}/b.json"])
            found = json.loads(pathlib.Path(folder, "b.json").read_text())
        self.assertEqual(status, 0, out.getvalue())
        self.assertEqual([row["function"] for row in found["rows"]], list(bench.FUNCTIONS))
        self.assertTrue(all(row["fastweight_both_ms"] > 0 for row in found["rows"]))

    def test_bench_has_the_parts_of_a_call(self):
        from fastweight import host

        rows = host.measure(calls=2, rounds=2)
        in_graph = f"{host.IN_GRAPH} in a graph"
        for part, whole in (("the library's forward", "prepared forward"), ("the library's backward", "prepared backward"),
                            (f"a Function that computes nothing, {in_graph}", f"forward and backward, {in_graph}")):
            self.assertIn(part, rows)
            self.assertGreater(rows[whole][1], 0)


if __name__ == "__main__":
    unittest.main()
