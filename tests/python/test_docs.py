"""The documentation that lies in the Python sources: docstrings and their examples, annotations, fastweight.rules, examples/python."""

import doctest
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import unittest
from unittest import mock

import fastweight
import fastweight.rules
import fastweight.torch
import reference
from fastweight import _library

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = ROOT / "include/fastweight/fastweight.h"
MODULES = ("fastweight", "fastweight._library", "fastweight.rules", "fastweight.convert", "fastweight.torch", "fastweight.torch.nn", "fastweight.torch.ops",
           "fastweight.torch.ops._delta", "fastweight.torch.ops._linear", "fastweight.torch.ops._comba", "fastweight.torch.ops._precond",
           "fastweight.torch.pools", "fastweight.fla", "fastweight.hf", "fastweight.vllm", "fastweight.sglang")
if importlib.util.find_spec("transformers"):
    MODULES += ("fastweight.models", "fastweight.models._cache", "fastweight.models._configuration", "fastweight.models._modeling", "fastweight.models._tokenizer")
NEEDS = {"fastweight.fla": "fla", "fastweight.hf": "transformers"}
ALONE = """import doctest, importlib, sys
found = doctest.testmod(importlib.import_module(sys.argv[1]), optionflags=doctest.ELLIPSIS)
sys.exit(found.failed or not found.attempted)"""
RULES = fastweight.rules.names() + ["gated_deltanet2_b_only", "precond_norm_gated", "precond_exact",
                                    "decay=channel gain=longhorn feedback=learned read=corrected write=channel"]

OTHER_RULES = ["gated_deltanet erase=scalar", "kda write=scalar", "gated_deltanet erase=channel", "kda key_source=decay", "deltanet erase_key=own",
               "dplr erase_write=own", "deltanet read=corrected"]


def public(module):
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            yield f"{module.__name__}.{name}", value


@unittest.skipUnless((ROOT / "docs/howto/fine-tune.md").exists(), "the documentation is not beside these tests")
class Tables(unittest.TestCase):
    def test_model_types_are_those_of_the_program(self):
        """The names of both tables of model types, and the limits of GPUs that they say, against the sources."""
        types = set(re.findall(r"^    \{(?:\.name = )?\"(\w+)\"", (ROOT / "src/model/interop/hf_types.cpp").read_text().split("kTypes[]")[1], re.M))
        kinds, rows = (ROOT / "src/ops/cuda/kinds.h").read_text(), (ROOT / "docs/howto/fine-tune.md").read_text().split("| `model_type` |")[1].split("\n\n")[0]
        named = set(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in rows.splitlines()[2:])))
        self.assertEqual(named - types, {"fastweight"})
        self.assertIn(f"latents up to {re.search(r'kMostAttentionDim = (.*);', kinds)[1]} ", rows)
        self.assertIn(f"heads up to {re.search(r'kMostMesaKey = (.*);', kinds)[1]} ", rows)
        page = (ROOT / "docs/conformance.md").read_text().split("| model_type |")[1].split("### Keys")[0]
        self.assertEqual(types - set(re.findall(r"`(\w+)`", page)) - {"gdn2", "mamba_ssm"}, set())
        self.assertLessEqual({name for name in types if name.startswith(("qwen", "olmo", "kimi"))} - {"qwen3_5", "qwen3_5_moe"}, named)


class Docstrings(unittest.TestCase):
    def test_examples_run(self):
        for name in MODULES:
            if name in NEEDS and not importlib.util.find_spec(NEEDS[name]):
                continue
            with self.subTest(module=name), mock.patch.dict(os.environ):
                if name in NEEDS:  # in a process of its own: other tests want these packages as they were
                    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE, name], capture_output=True, text=True)
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                    continue
                found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
                self.assertGreater(found.attempted, 0)
                self.assertEqual(found.failed, 0)

    def test_every_public_name_is_described_with_an_example(self):
        for module in map(importlib.import_module, MODULES):
            for name, value in public(module) if hasattr(module, "__all__") else ():
                with self.subTest(name=name):
                    self.assertIn(">>> ", inspect.getdoc(value) or "")

    def test_every_public_function_is_annotated(self):
        for module in map(importlib.import_module, MODULES):
            for name, value in public(module) if hasattr(module, "__all__") else ():
                if inspect.isfunction(value):
                    with self.subTest(name=name):
                        signature = inspect.signature(value)
                        bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
                        self.assertEqual(bare, [])
                        self.assertIsNot(signature.return_annotation, signature.empty)

    def test_dir_shows_public_names_only(self):
        for module in map(importlib.import_module, MODULES):
            if hasattr(module, "__all__"):
                with self.subTest(module=module.__name__):
                    self.assertEqual([name for name in dir(module) if name.startswith("_")], [])
                    for name in dir(module):
                        self.assertIsNotNone(getattr(module, name))
        self.assertEqual(sorted(fastweight.torch.__all__), sorted(dir(fastweight.torch)))

    def test_the_package_says_that_it_is_typed(self):
        self.assertTrue((pathlib.Path(fastweight.__file__).parent / "py.typed").exists())


class Rules(unittest.TestCase):
    def test_a_description_has_the_shapes_of_the_reference(self):
        letters = {"B": 2, "T": 3, "H": 5, "HV": 10, "K": 7, "V": 11, "N": 2, "H or HV": 10}
        for rule in RULES:
            with self.subTest(rule=rule):
                info = fastweight.rules.describe(rule)
                found = {t.name: tuple(letters[x] for x in t.shape) for t in info.inputs if t.required}
                self.assertEqual(found, reference.shapes(rule, 2, 3, 5, 10, 7, 11))
                self.assertEqual({**info.axes, **info.numbers}, reference.axes(rule))
                self.assertEqual(fastweight.rules.describe(info.text).axes if info.text else info.axes, info.axes)
                self.assertEqual([t.name for t in info.outputs][:2], ["o", "final_state"])

    def test_every_tensor_of_the_header_has_a_meaning(self):
        header = [name for struct in ("fw_inputs", "fw_outputs") for name, _ in _library.header().structs[struct]._fields_ if name != "size"]
        self.assertEqual(["lambda_" if name == "lambda" else name for name in header], list(fastweight.rules._MEANINGS))

    @unittest.skipUnless(os.environ.get("FASTWEIGHT_PROGRAM"), "FASTWEIGHT_PROGRAM names no program")
    def test_the_program_says_the_same(self):
        done = subprocess.run([os.environ["FASTWEIGHT_PROGRAM"], "rules", "--json"], capture_output=True, text=True, check=True)
        for entry in json.loads(done.stdout)["rules"]:
            with self.subTest(rule=entry["name"]):
                info = fastweight.rules.describe(entry["name"])
                self.assertEqual((info.axes, info.numbers, info.text), (entry["axes"], entry["numbers"], entry["text"]))
                required = {t.name.rstrip("_"): f"[{', '.join(t.shape)}]" for t in info.inputs if t.required}
                self.assertEqual(set(required), set(entry["inputs"]))
                if "shapes" in entry:
                    self.assertEqual(required, entry["shapes"])


def table_of(header, call):
    """The rows of a call's table in the C header: {tensor: {column: cell}}."""
    comment = header[: header.index(f"FW_API fw_status {call}(")].rpartition("/*")[2]
    rows = [[cell.strip() for cell in line.strip(" *|").split(" | ")] for line in comment.splitlines() if line.startswith(" * | ")]
    return {row[0]: dict(zip(rows[0], row)) for row in rows[1:]}


@unittest.skipUnless(HEADER.exists(), "the C header is not beside these tests")
class CHeader(unittest.TestCase):
    """The tables of the C header beside what the library asks for."""

    def setUp(self):
        self.header = HEADER.read_text(encoding="utf-8")

    def test_the_table_of_forward_lists_the_structs(self):
        listed = [name for name in table_of(self.header, "fw_forward") if "." in name]
        structs = (("in", "fw_inputs"), ("out", "fw_outputs"))
        fields = [f"{short}.{name}" for short, struct in structs for name, _ in _library.header().structs[struct]._fields_ if name != "size"]
        self.assertEqual(listed, fields)

    def test_shapes_dtypes_and_needs_are_the_librarys(self):
        table = table_of(self.header, "fw_forward")
        required, absent = set(), set()
        for rule in RULES + OTHER_RULES:
            info = fastweight.rules.describe(rule)
            found = {t.name.rstrip("_"): t for t in info.inputs}
            for name, tensor in found.items():
                row = table[f"in.{name}"]
                with self.subTest(rule=rule, tensor=name):
                    self.assertIn(f"[{', '.join(tensor.shape)}]", row["shape"])
                    if row["dtype"] == "token" or tensor.dtype == "token":
                        self.assertEqual(row["dtype"], tensor.dtype)
            required |= {name for name, tensor in found.items() if tensor.required}
            absent |= {name.partition(".")[2] for name in table if name.startswith("in.")} - {name for name, tensor in found.items() if tensor.required}
        for name, row in table.items():
            if name.startswith("in."):
                with self.subTest(tensor=name):
                    self.assertEqual((name[3:] in required, name[3:] in absent),
                                     (True, False) if row["required when"] == "always" else (not row["required when"].startswith("optional"), True))

    def test_the_version_is_one(self):
        numbers = [re.search(rf"#define FW_VERSION_{part} (\d+)", self.header)[1] for part in ("MAJOR", "MINOR", "PATCH")]
        self.assertEqual(fastweight.version(), ".".join(numbers))
        project = (ROOT / "python/pyproject.toml").read_text(encoding="utf-8")
        pattern = re.search(r"^regex = '''(.*)'''$", project, re.M)[1]
        self.assertEqual(list(re.search(pattern, self.header).groups()), numbers)
        release = re.search(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
        self.assertEqual(release[1], fastweight.version())


class Examples(unittest.TestCase):
    def run_example(self, name, *arguments):
        done = subprocess.run([sys.executable, "-W", "ignore", ROOT / "examples/python" / name, *arguments], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def setUp(self):
        if not (ROOT / "examples/python").exists():
            self.skipTest("the examples are not beside these tests")
        if "FASTWEIGHT_SHORT_TESTS" in os.environ:
            self.skipTest("the newest torch runs the examples")

    @unittest.skipUnless(importlib.util.find_spec("fla") and importlib.util.find_spec("triton"), "flash-linear-attention is not there")
    def test_fla_on_these_kernels(self):
        self.assertIn("calls served: 1, passed on to FLA: 0", self.run_example("fla_drop_in.py"))

    def test_a_composed_rule_is_trained(self):
        self.assertIn("learned: True", self.run_example("compose_a_rule.py"))

    def test_layers_are_trained_and_decode(self):
        self.assertIn("repeated from the state: True", self.run_example("train_layers.py"))

    def test_decoding_from_a_state(self):
        self.assertIn("decoded equals the whole sequence: True", self.run_example("decode_with_a_state.py"))


if __name__ == "__main__":
    unittest.main()
