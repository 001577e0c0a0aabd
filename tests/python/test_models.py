"""fastweight.models: transformers' classes for the engine's models, beside the engine; generation, padding, packed sequences, training, tokenizers."""

import contextlib
import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import torch
import torch.nn.functional as F

from fastweight import Error

try:
    import transformers

    import fastweight.models
except ImportError as error:
    raise unittest.SkipTest(f"transformers 5.24 is not there: {error}")
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from fastweight.models import ByteTokenizer, FastweightConfig, FastweightForCausalLM, FastweightModel
from fastweight.torch import _calls, set_form
from test_hybrids import run_its_own_code
from test_nn import CASES

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
PROGRAM = os.environ.get("FASTWEIGHT_PROGRAM")
SHORT = "FASTWEIGHT_SHORT_TESTS" in os.environ
RELEASED = pathlib.Path(__file__).resolve().parent.parent / "conformance/models"
PAGE = pathlib.Path(__file__).resolve().parent.parent.parent / "docs/python.md"
HYBRID = {"rule": "kda", "layers": ["recurrent", "window", "gated_deltanet", "attention", "conv"], "mixer": {"window": {"window": 5}}, "num_hidden_layers": 5}
OTHERS = [
    HYBRID,
    {"layers": ["attention"], "norm": "layer", "embedding_norm": True, "mlp": "channel_mix", "tie_word_embeddings": False,
     "mixer": {"attention": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "qk_norm": True, "qkv_bias": True, "rope_fraction": 0.67}}},
    {"layers": ["deltanet", "window"], "mixer": {"window": {"window": 3, "num_kv_heads": 1}}, "output_norm_eps": 1e-3, "mlp": "none"},
    {"layers": ["window"], "mixer": {"window": {"window": 40, "rope_theta": 0.0}}},
    {"layers": ["conv"], "mixer": {"conv": {"kernel": 1}}, "mlp": "channel_mix", "intermediate_size": 40},
    # Qwen3.5's layers and OLMo hybrid's.
    {"rule": "gated_deltanet", "layers": ["recurrent", "attention"], "norm": "zero_centered_rms", "num_v_heads": 4,
     "mixer": {"attention": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": True, "qk_norm_eps": 1e-3, "output_gate": True, "rope_fraction": 0.25}}},
    {"rule": "gated_deltanet", "layers": ["recurrent", "attention"], "allow_neg_eigval": True,
     "mixer": {"attention": {"qk_norm": True, "qk_norm_all_heads": True, "post_norm": True, "rope_theta": 0.0}}},
]
# Layers that are no rule's.
PUBLISHED = [
    {"layers": ["mamba", "longhorn_diag"], "mlp": "none", "mixer": {"mamba": {"state_size": 4, "dt_rank": 3}}},
    {"layers": ["ssd", "window"], "mixer": {"ssd": {"head_dim": 12, "state_size": 6, "num_groups": 2}, "window": {"window": 5}}},
    {"layers": ["mamba3"], "mixer": {"mamba3": {"head_dim": 12, "state_size": 8}}},
    {"layers": ["mamba3", "attention"], "mixer": {"mamba3": {"head_dim": 12, "state_size": 8, "mimo_rank": 2, "num_groups": 2, "output_norm": True,
                                                             "decay_activation": "heavy_tail"}}},
    {"layers": ["mesa"], "mixer": {"mesa": {"output_gate": "silu", "head_dim": 6, "conv_size": 3}}},
    {"layers": ["recurrent", "rwkv7", "rwkv7"], "num_hidden_layers": 3, "norm": "layer", "embedding_norm": True, "mlp": "channel_mix",
     "mixer": {"rwkv7": {"head_dim": 12, "decay_rank": 3, "rate_rank": 4, "value_rank": 2, "gate_rank": 5}}},
    {"layers": ["rwkv7", "mesa"], "mixer": {"rwkv7": {"key_eps": 1e-6}, "mesa": {"cg_steps": 30}}},
]
# Latent attention and mixtures of experts: those of Kimi Linear, Qwen3-Next, and what neither has.
MLA = {"num_heads": 4, "kv_rank": 6, "key_dim": 4, "shared_key_dim": 2, "value_dim": 3}
KIMI = {"rule": "kda", "layers": ["recurrent", "mla"], "mlp": "experts", "intermediate_size": 20, "decay_rank": 8, "output_gate": "sigmoid", "output_gate_rank": 8,
        "output_gate_bias": False, "mixer": {"mla": MLA}, "num_hidden_layers": 3,
        "ffn": {"experts": {"num_experts": 6, "router": "sigmoid", "scale": 2.446, "groups": 3, "top_groups": 2, "correction_bias": True, "shared_size": 6, "dense_layers": 1}}}
EXPERTS = [
    KIMI,
    {"rule": "gated_deltanet", "layers": ["recurrent", "attention"], "mlp": "experts",
     "ffn": {"experts": {"num_experts": 4, "intermediate_size": 6, "normalise": False, "shared_size": 5, "shared_gate": True}}},
    {"layers": ["mla"], "mixer": {"mla": {**MLA, "num_heads": 0, "shared_key_dim": 0}}, "mlp": "experts", "intermediate_size": 24,
     "ffn": {"experts": {"num_experts": 3, "top_k": 3, "router": "sigmoid", "normalise": False, "balance": 0.1}}},
]
OTHERS += PUBLISHED + EXPERTS
TOKENS = 48


def setUpModule():
    global threads
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: more threads only wait for each other


def tearDownModule():
    torch.set_num_threads(threads)


def made(spread=0.3, **options):
    """A model whose every parameter shows."""
    config = FastweightConfig(**{"hidden_size": 24, "num_heads": 2, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 64, **options})
    model = FastweightForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if "dplr" in (config.rule, *config.layers) else spread))  # dplr's steps may grow
    return model


def program(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout


def released(kind, folder):
    """A model of the conformance tests with a tokenizer of letters."""
    import tokenizers

    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((RELEASED / kind / name).read_bytes())
    vocab = {chr(97 + i): i for i in range(json.loads((folder / "config.json").read_text())["vocab_size"])}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[])).save(str(folder / "tokenizer.json"))


class Case(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(5)
        random.seed(5)
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.folder = pathlib.Path(self.stack.enter_context(tempfile.TemporaryDirectory()))

    def close(self, a, b, tolerance=3e-6):
        self.assertEqual(a.shape, b.shape)
        self.assertLess(((a - b).norm() / b.norm()).item(), tolerance)


@unittest.skipUnless(PROGRAM, "FASTWEIGHT_PROGRAM: not given")
class Engine(Case):
    def test_every_layer_gives_the_engines_logits_gradients_and_tokens(self):
        """A folder that save_pretrained() wrote, in `fastweight verify`. The same models with padding, with a cache, and step by step."""
        cases = (CASES + OTHERS)[:: 7 if SHORT else 1]
        for number, options in enumerate(cases):
            model = made(**options, **({"num_v_heads": 4} if number % 4 == 3 else {}))
            ids = torch.randint(0, 64, (2, TOKENS))
            out = model(ids)
            loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            folder = self.folder / str(number)
            model.save_pretrained(folder)
            greedy = model.generate(ids[:1, :40], max_new_tokens=8, do_sample=False)[:, 40:]
            values = {"input_ids": ids.int(), "logits": out.logits, "loss": loss[None], "greedy": greedy.int()}
            values.update({f"grad/{name}": torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()})
            save_file({name: value.detach().contiguous() for name, value in values.items()}, folder / "io.safetensors")
            with self.subTest(**options):
                self.padded_and_stepped(model, ids, out.logits.detach())
        with contextlib.suppress(AssertionError):  # what did not pass is in the report
            report = program("verify", self.folder, "--dtype", "f32", "--json", "--threads", "1")
        report = json.loads(report)
        self.assertEqual((report["unknown"], report["unreadable"], len(report["compared"])), ([], [], 4 * len(cases)))
        for row in report["compared"]:
            with self.subTest(compared=row["compared"], **cases[int(row["subject"])]):
                self.assertTrue(row["ok"], row)
                if row["compared"] in ("logits", "loss"):
                    self.assertLess(row["error"], 2e-5)

    @torch.no_grad()
    def padded_and_stepped(self, model, ids, logits):
        mask = torch.ones(2, 21, dtype=torch.long)
        mask[1, :7] = 0
        self.close(model(ids, use_cache=False).logits, logits)
        first = model(ids[:, :20], attention_mask=mask[:, :20], use_cache=True)
        second = model(ids[:, 20:21], attention_mask=mask, cache=first.cache)
        alone = model(ids[1:, 7:21]).logits
        self.close(torch.cat([first.logits, second.logits], 1)[0], logits[0, :21])
        self.close(torch.cat([first.logits, second.logits], 1)[1, 7:], alone[0])

    def trained(self, text, run, layers, *options, command=("train",)):
        program(*command, "--text", text, "--steps", "2", "--batch", "2", "--length", "32", "--out", self.folder / run, "--hidden-size", "24", "--num-heads", "2",
                "--head-dim", "8", "--num-hidden-layers", str(len(layers.split(","))), "--layers", layers, "--lr", "0.02", "--threads", "1", *options)

    def test_what_train_wrote_of_other_layers_opens_and_goes_back(self):
        text, tables = self.folder / "text.txt", self.folder / "tables.toml"
        text.write_text("".join(f"{i} and {i * i % 97} is {'abc'[i % 3]}; " for i in range(60)))
        tables.write_text("[mixer.mla]\nkv_rank = 6\nkey_dim = 4\nshared_key_dim = 2\nvalue_dim = 3\n[mixer.ssd]\nhead_dim = 12\nstate_size = 6\n[mixer.mamba3]\n"
                          "head_dim = 12\nstate_size = 8\n[mixer.mesa]\ncg_steps = 30\n[ffn.experts]\nnum_experts = 4\nshared_size = 5\ndense_layers = 1\n")
        self.trained(text, "run", "mla,mesa,mamba,longhorn_diag,ssd,mamba3,rwkv7,conv", "--mlp", "experts", command=("train", tables))
        before, after = self.folder / "run/model", self.folder / "saved"
        model = AutoModelForCausalLM.from_pretrained(before)
        model.save_pretrained(after)
        (after / "tokenizer.json").write_bytes((before / "tokenizer.json").read_bytes())
        ours, theirs = load_file(after / "model.safetensors"), load_file(before / "model.safetensors")
        self.assertEqual(set(ours), set(theirs))
        for name, value in theirs.items():
            self.assertTrue(torch.equal(ours[name], value), name)
        texts = [program("eval", folder, "--text", text, "--context", "0", "--json", "--threads", "1") for folder in (before, after)]
        results = [json.loads(t)["results"][0]["nll"] for t in texts]
        self.assertEqual(*results)
        ids = torch.tensor(list(text.read_bytes()))[None]
        with torch.no_grad():
            loss = F.cross_entropy(model(ids[:, :-1]).logits[0].double(), ids[0, 1:], reduction="sum").item()
        self.assertAlmostEqual(results[0] / loss, 1, delta=3e-6)

    def test_what_train_wrote_opens_and_goes_back_bit_for_bit(self):
        text = self.folder / "text.txt"
        text.write_text("".join(f"{i} and {i * i % 97} is {'abc'[i % 3]}; " for i in range(60)))
        self.trained(text, "run", "recurrent,window,gated_deltanet,attention")
        before, after = self.folder / "run/model", self.folder / "saved"
        model, tokenizer = AutoModelForCausalLM.from_pretrained(before), AutoTokenizer.from_pretrained(before)
        self.assertIsInstance(model, FastweightForCausalLM)
        self.assertIsInstance(tokenizer, ByteTokenizer)
        self.assertIsInstance(AutoModel.from_pretrained(before), FastweightModel)
        model.save_pretrained(after)
        tokenizer.save_pretrained(after)
        ours, theirs = load_file(after / "model.safetensors"), load_file(before / "model.safetensors")
        self.assertEqual(set(ours), set(theirs))
        for name, value in theirs.items():
            self.assertTrue(torch.equal(ours[name], value), name)
        config = json.loads((before / "config.json").read_text())
        self.assertEqual(json.loads((after / "config.json").read_text()), config)
        # Every key of the engine, with its default where nothing else was asked for.
        asked = {"hidden_size": 24, "num_heads": 2, "head_dim": 8, "num_hidden_layers": 4, "layers": config["layers"]}
        self.assertEqual(FastweightConfig(**asked).to_diff_dict(), config)
        ids = torch.tensor(tokenizer(text.read_text()).input_ids)[None]
        with torch.no_grad():
            loss = F.cross_entropy(model(ids[:, :-1]).logits[0].double(), ids[0, 1:], reduction="sum").item()
        for folder in (before, after):
            result = json.loads(program("eval", folder, "--text", text, "--context", "0", "--json", "--threads", "1"))["results"][0]
            self.assertAlmostEqual(result["nll"] / loss, 1, delta=3e-6)
        # Steps from the same text.
        tokens = model.generate(**tokenizer("7 and", return_tensors="pt"), max_new_tokens=20, do_sample=False)
        said = program("generate", after, "--prompt", "7 and", "--tokens", "20", "--temperature", "0", "--threads", "1")
        self.assertIn(tokenizer.decode(tokens[0]), said)
        # In bfloat16 the engine reads the rounded values.
        model.bfloat16().save_pretrained(after)
        self.assertEqual(AutoModelForCausalLM.from_pretrained(after).dtype, torch.bfloat16)
        result = json.loads(program("eval", after, "--text", text, "--context", "0", "--json", "--threads", "1"))["results"][0]
        self.assertAlmostEqual(result["nll"] / loss, 1, delta=2e-2)

    @unittest.skipUnless(RELEASED.is_dir(), "the released models are not beside these tests")
    def test_imported_hybrids_give_transformers_logits(self):
        for kind in ("qwen3_5", "olmo_hybrid", "qwen3_next", "qwen3_5_moe", "kimi_linear"):
            with self.subTest(kind=kind):
                given = self.folder / f"{kind}-given"
                released(kind, given)
                program("import", given, self.folder / kind)
                model, io = AutoModelForCausalLM.from_pretrained(self.folder / kind).eval(), load_file(RELEASED / kind / "io.safetensors")
                self.assertIsInstance(model, FastweightForCausalLM)
                with torch.no_grad():
                    self.close(model(io["input_ids"].long()).logits, io["logits"], 2e-5)
                model.save_pretrained(self.folder / f"{kind}-saved")
                (self.folder / f"{kind}-saved/tokenizer.json").write_bytes((self.folder / kind / "tokenizer.json").read_bytes())
                program("export", self.folder / f"{kind}-saved", self.folder / f"{kind}-back")
                ours, theirs = (load_file(folder / "model.safetensors") for folder in (self.folder / f"{kind}-back", RELEASED / kind))
                self.assertEqual({name: t.tolist() for name, t in ours.items()}, {name: t.tolist() for name, t in theirs.items()})

    @unittest.skipUnless(PAGE.exists(), "the documentation is not beside these tests")
    def test_the_example_of_the_documentation_runs(self):
        made(vocab_size=256, **HYBRID).save_pretrained(self.folder / "run/model")
        example = next(part for part in PAGE.read_text(encoding="utf-8").split("```python\n")[1:] if part.startswith("import fastweight.models")).split("```")[0]
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", example], capture_output=True, text=True, cwd=self.folder)
        self.assertIn("and two", done.stdout, done.stderr)
        program("eval", self.folder / "changed", "--text", self.folder / "changed/tokenizer_config.json", "--threads", "1")

    @unittest.skipUnless(importlib.util.find_spec("sentencepiece"), "sentencepiece is not there")
    def test_sentencepiece_has_the_engines_ids(self):
        text = self.folder / "text.txt"
        text.write_text("".join(f"{i}  and {i * i % 97} </s> is é€ {'abc'[i % 3]};\n" for i in range(200)))
        for kind in ("unigram", "bpe"):
            run, pieces, saved = self.folder / kind, self.folder / f"{kind}.model", self.folder / f"{kind}-saved"
            program("tokenize", text, "--train-sentencepiece", "--vocab", "300", "--model-type", kind, "--out", pieces)
            program("train", "--text", text, "--tokenizer", pieces, "--steps", "1", "--batch", "2", "--length", "32", "--out", run, "--hidden-size", "24",
                    "--num-heads", "2", "--head-dim", "8", "--num-hidden-layers", "1", "--vocab-size", "0", "--threads", "1")
            model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "model"), AutoTokenizer.from_pretrained(run / "model")
            model.save_pretrained(saved)
            tokenizer.save_pretrained(saved)
            for one in (tokenizer, AutoTokenizer.from_pretrained(saved)):
                ids = torch.tensor(one(text.read_text()).input_ids)[None]
                self.assertEqual(one.decode(ids[0]), text.read_text())
                with torch.no_grad():
                    loss = F.cross_entropy(model(ids[:, :-1]).logits[0].double(), ids[0, 1:], reduction="sum").item()
                result = json.loads(program("eval", run / "model", "--text", text, "--context", "0", "--json", "--threads", "1"))["results"][0]
                self.assertEqual(result["tokens"], ids.shape[1] - 1)
                self.assertAlmostEqual(result["nll"] / loss, 1, delta=3e-6)
            (self.folder / "plain.txt").write_text("7 and 49 is b;\n8 and 64 is c;")
            both = (program("eval", folder, "--text", self.folder / "plain.txt", "--context", "0", "--threads", "1") for folder in (run / "model", saved))
            self.assertEqual(*both)
            batch = tokenizer(["7 and", "7"], padding=True)
            self.assertEqual([sum(row) for row in batch.attention_mask], [len(tokenizer(t).input_ids) for t in ("7 and", "7")])

    @unittest.skipUnless(importlib.util.find_spec("lm_eval"), "lm_eval is not there")
    def test_lm_evaluation_harness_gives_the_engines_scores(self):
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM

        made(vocab_size=256, **HYBRID).save_pretrained(self.folder / "model")
        draw = lambda size: "".join(random.choice("abc xyz\n") for _ in range(size)) + "."  # noqa: E731
        pairs, page = [(draw(random.randrange(1, 30)), " " + draw(random.randrange(1, 9))) for _ in range(6)], draw(80)
        requests = [{"task": "last", "id": str(i), "type": "ll", "ctx": a, "cont": b} for i, (a, b) in enumerate(pairs)]
        requests += [{"task": "page", "id": "0", "type": "rolling", "text": page, "n_words": 9, "n_bytes": len(page)},
                     {"task": "output", "id": "0", "type": "gen", "prompt": "abc", "answers": ["7"], "max_gen": 8, "until": ["\n"], "metric": "contains"}]
        (self.folder / "requests.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests))
        program("eval", self.folder / "model", "--requests", self.folder / "requests.jsonl", "--out", self.folder / "out", "--threads", "1")
        ours = [json.loads(line) for line in (self.folder / "out/samples.jsonl").read_text().splitlines()]
        harness = HFLM(pretrained=str(self.folder / "model"), device="cpu", batch_size=4)
        ask = lambda kind, all: [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(all)]  # noqa: E731
        theirs = [score for score, _ in harness.loglikelihood(ask("loglikelihood", pairs), disable_tqdm=True)]
        theirs += harness.loglikelihood_rolling(ask("loglikelihood_rolling", [(page,)]), disable_tqdm=True)
        for mine, other in zip([s["metrics"]["log_likelihood"] for s in ours[:-1]], theirs, strict=True):
            self.assertAlmostEqual(mine / other, 1, delta=1e-4)
        until = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
        self.assertEqual(ours[-1]["output"], harness.generate_until(ask("generate_until", [("abc", until)]), disable_tqdm=True)[0])


class Generation(Case):
    def test_padding_cache_and_beams_change_nothing(self):
        for model in (made(**HYBRID), made(**KIMI)):
            with self.subTest(rule=model.config.rule, mlp=model.config.mlp):
                self.padding_cache_and_beams(model)

    def padding_cache_and_beams(self, model):
        rows = [torch.randint(1, 64, (n,)) for n in (9, 3, 14, 1)]  # without the padding's token, which generate() masks
        ids, mask = torch.zeros(4, 14, dtype=torch.long), torch.zeros(4, 14, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, 14 - len(row) :], mask[i, 14 - len(row) :] = row, 1
        for options in ({}, {"num_beams": 3}):
            settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **options}
            batch = model.generate(ids, attention_mask=mask, **settings)[:, 14:]
            self.assertEqual(batch.tolist(), model.generate(ids, attention_mask=mask, use_cache=False, **settings)[:, 14:].tolist())
            for i, row in enumerate(rows):
                self.assertEqual(batch[i].tolist(), model.generate(row[None], **settings)[0, len(row) :].tolist())

    def test_recurrences_of_training_may_have_the_bits_of_decoding(self):
        model = made(rule="kda", layers=["recurrent", "ssd", "attention"], num_hidden_layers=3, mixer={"ssd": {"head_dim": 12, "state_size": 6}}).train()
        ids = torch.randint(0, 64, (2, 70))
        want = model(ids, labels=ids)
        forms, make = [], _calls.forward_call

        def seen(config, *rest):
            forms.append(config.form)
            return make(config, *rest)

        former = set_form("decode")
        self.addCleanup(set_form, former)
        with unittest.mock.patch.object(_calls, "forward_call", seen):
            found = model(ids, labels=ids)
        self.assertEqual(forms, [_calls.FORMS["decode"]] * 2)
        self.close(found.logits, want.logits)
        parameters = list(model.parameters())
        for a, b in zip(torch.autograd.grad(found.loss, parameters), torch.autograd.grad(want.loss, parameters)):
            self.close(a, b, 1e-4)

    @torch.no_grad()
    def test_padding_anywhere_and_text_in_pieces(self):
        """Four pieces with padding in the middle and at either end: the state goes on behind it."""
        for model in (made(**HYBRID, mlp="channel_mix"), made(**KIMI)):
            with self.subTest(mlp=model.config.mlp):
                self.text_in_pieces(model)

    def text_in_pieces(self, model):
        ids = torch.randint(0, 64, (3, 24))
        mask = torch.rand(3, 24) < 0.7
        mask[:, 5], mask[0, 12:18] = True, False  # a row with a piece of padding alone
        want = [model(row[real][None]).logits[0] for row, real in zip(ids, mask)]
        for ends in ([24], [6, 12, 18, 24], [1, 2, 3, 24]):
            cache, found, begin = None, [], 0
            for end in ends:
                out = model(ids[:, begin:end], attention_mask=mask[:, :end].long(), cache=cache, use_cache=True)
                cache, begin = out.cache, end
                found.append(out.logits)
            logits = torch.cat(found, 1)
            for i in range(3):
                self.close(logits[i][mask[i]], want[i])
            self.assertEqual((cache.get_seq_length(), cache.tokens.tolist()), (24, mask.sum(1).tolist()))

    @torch.no_grad()
    def test_the_cache_of_recurrent_layers_and_windows_does_not_grow(self):
        model = made(rule="gated_deltanet", layers=["recurrent", "window"], mixer={"window": {"window": 4}}, mlp="channel_mix")
        short, long = (model(torch.randint(0, 64, (2, n)), use_cache=True).cache for n in (3, 40))
        self.assertEqual(short.nbytes, long.nbytes)
        attention = made(layers=["attention"])
        self.assertGreater(*(attention(torch.randint(0, 64, (2, n)), use_cache=True).cache.nbytes for n in (40, 3)))

    @torch.no_grad()
    def test_a_conversation_goes_on_from_its_cache(self):
        model = made(**HYBRID)
        ids = torch.randint(0, 64, (1, 10))
        first = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, torch.randint(0, 64, (1, 4))], 1)
        again = model.generate(longer, max_new_tokens=5, do_sample=False, cache=first.cache)
        self.assertEqual(again.tolist(), model.generate(longer, max_new_tokens=5, do_sample=False).tolist())
        old, new = (model(ids, use_cache=True).cache for _ in range(2))
        self.assertTrue(torch.equal(model(ids, past_key_values=old).logits, model(ids, cache=new).logits))
        cache = first.cache
        with self.assertRaisesRegex(Error, "crop: expected 0"):
            cache.crop(1)
        with self.assertRaisesRegex(Error, "cache: expected one of 2 sequences, as input_ids has, got one of 1"):
            model(ids.repeat(2, 1), cache=cache)
        cache.batch_repeat_interleave(2)
        logits = model(ids[:, :1].repeat(2, 1), cache=cache).logits
        self.assertTrue(torch.equal(logits[0], logits[1]))

    @torch.no_grad()
    def test_a_long_window_in_blocks_is_the_window(self):
        model = made(layers=["window"], mixer={"window": {"window": 4, "num_kv_heads": 1}})
        ids = torch.randint(0, 64, (2, 30))
        whole = model(ids).logits
        stepped = model(ids[:, :2], use_cache=True)
        found = [stepped.logits]
        for t in range(2, 30):
            found.append(model(ids[:, t : t + 1], cache=stepped.cache).logits)
        self.close(torch.cat(found, 1), whole)

    def test_bfloat16_generates(self):
        for options in (HYBRID, KIMI):
            model = made(**options).bfloat16()
            self.assertEqual(model.generate(torch.randint(0, 64, (2, 5)), max_new_tokens=4, do_sample=False).shape, (2, 9))


class Training(Case):
    def gradients(self, model, **inputs):
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def test_gradient_checkpointing_gives_the_same(self):
        for options in (HYBRID, KIMI):
            with self.subTest(rule=options["rule"]):
                self.same_with_checkpointing(made(**options).train())

    def same_with_checkpointing(self, model):
        ids = torch.randint(0, 64, (2, 12))
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        inputs = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
        loss, want = self.gradients(model, **inputs)
        model.gradient_checkpointing_enable()
        again, found = self.gradients(model, **inputs)
        self.assertEqual(loss, again)
        self.assertEqual(set(found), {name for name, _ in model.named_parameters()})
        for name, value in want.items():
            self.assertTrue(torch.equal(found[name], value), name)

    def test_the_balance_of_experts_adds_its_gradient_in_training(self):
        model = made(layers=["recurrent"], mlp="experts", ffn={"experts": {"num_experts": 4, "balance": 0.5}})
        ids, scores = torch.randint(0, 64, (2, 12)), []
        for block in model.model.layers:
            block.mlp.gate.register_forward_hook(lambda router, x, out: scores.append((F.linear(x[0], router.weight).softmax(-1), out[0])))
        loss = model(ids, labels=ids).loss
        balance = sum(4 * (torch.bincount(chosen.flatten(), minlength=4) / 24 * s.mean(0)).sum() for s, chosen in scores) / 2
        wanted = torch.autograd.grad(loss + 0.5 * balance, list(model.parameters()), retain_graph=True)
        without = torch.autograd.grad(loss, list(model.parameters()))
        found = model.train()(ids, labels=ids).loss
        self.assertEqual(found.item(), loss.item())
        found.backward()
        for (name, p), want, plain in zip(model.named_parameters(), wanted, without):
            self.close(p.grad, want, 1e-5)
            if name.endswith("gate.weight"):
                self.assertGreater((p.grad - plain).norm(), 1e-3 * plain.norm())

    @torch.no_grad()
    def test_packed_sequences_do_not_see_each_other(self):
        for model in (made(**HYBRID, mlp="channel_mix"), made(**KIMI)):
            with self.subTest(mlp=model.config.mlp):
                self.packed(model)

    def packed(self, model):
        rows = [torch.randint(0, 64, (1, n)) for n in (5, 1, 9)]
        want = torch.cat([model(row).logits for row in rows], 1)
        packed = torch.cat(rows, 1)
        self.close(model(packed, position_ids=torch.cat([torch.arange(row.shape[1]) for row in rows])[None]).logits, want)
        offsets = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
        self.close(model(packed, cu_seqlens=offsets.long()).logits, want)
        self.close(model(packed, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=9, max_length_k=9).logits, want)

    def test_first_values_are_the_engines_distributions(self):
        model = FastweightForCausalLM(FastweightConfig(hidden_size=256, num_heads=4, layers=["gated_deltanet", "attention"], num_hidden_layers=2,
                                                       tie_word_embeddings=False))
        bound = 2**-2.5 * (6 / 512) ** 0.5
        for layer in model.model.layers:
            self.assertAlmostEqual(layer.attn.q_proj.weight.std().item(), bound / 3**0.5, delta=3e-4)
        self.assertAlmostEqual(model.lm_head.weight.std().item(), 0.02, delta=5e-4)
        self.assertTrue(bool((model.model.layers[0].attn.A_log <= 2.8).all()))
        self.assertTrue(bool((model.model.norm.weight == 1).all()))

    @unittest.skipUnless(importlib.util.find_spec("accelerate"), "accelerate is not there")
    def test_trainer_takes_a_step(self):
        model = made(**HYBRID)
        before = {name: p.clone() for name, p in model.named_parameters()}
        data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (4, 10))]
        arguments = transformers.TrainingArguments(output_dir=str(self.folder), max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to=[],
                                                   disable_tqdm=True, gradient_checkpointing=True, learning_rate=1e-3)
        with contextlib.redirect_stdout(None):
            transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
        for name, p in model.named_parameters():
            self.assertFalse(torch.equal(p, before[name]), name)
        saved = AutoModelForCausalLM.from_pretrained(self.folder / "checkpoint-1")
        self.assertTrue(torch.equal(saved.model.embeddings.weight, model.model.embeddings.weight))

    @unittest.skipUnless(importlib.util.find_spec("peft"), "peft is not there")
    def test_lora_finds_every_projection(self):
        import peft

        for options in (HYBRID, {"rule": "kda", "decay_rank": 4, "output_gate_rank": 4}, *PUBLISHED, KIMI):
            model = made(**options)
            ids = torch.randint(0, 64, (2, 9))
            want = model(ids).logits
            projections = {name for name, module in model.model.named_modules() if isinstance(module, torch.nn.Linear)}
            adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
            found = {name.split("base_model.model.model.")[1] for name, module in adapted.named_modules() if isinstance(module, peft.tuners.lora.Linear)}
            self.assertEqual(found, projections)
            self.assertTrue(torch.equal(adapted(ids).logits, want))
            adapted(ids, labels=ids).loss.backward()
            for name, p in adapted.named_parameters():
                self.assertEqual(p.grad is not None, "lora_" in name, name)
            adapted.generate(input_ids=ids, max_new_tokens=2)


    @unittest.skipUnless(PROGRAM and importlib.util.find_spec("peft"), "peft or the program is not there")
    def test_adapters_of_experts_and_latents_are_pefts(self):
        """PEFT's adapters of every projection in `fastweight verify`: logits, gradients, and twenty steps of AdamW. The engine's in PEFT: the same loss."""
        import peft

        experts = ["experts.gate_up_proj", "experts.down_proj"]
        for number, parameters in enumerate((experts, experts[1:])):
            folder = self.folder / str(number)
            base = made(**KIMI).float()
            base.save_pretrained(folder)
            model = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", target_parameters=parameters, task_type="CAUSAL_LM"))
            adapters = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
            self.assertEqual(sum("experts" in name for name in adapters), 2 * 2 * len(parameters))
            with torch.no_grad():
                for name, p in adapters.items():
                    p.copy_((torch.randn_like(p) * (p.shape[1] ** -0.5 if "lora_A" in name else 0.2)).float())
            model.save_pretrained(folder)
            model.double()
            ids = torch.randint(0, 64, (2, 24))
            model(ids, labels=ids).loss.backward()
            out = model(ids, labels=ids)
            io = {"input_ids": ids.int(), "logits": out.logits, "loss": out.loss[None], **{f"grad/{name}": p.grad.clone() for name, p in adapters.items()}}
            batches, rates, losses, norms = torch.randint(0, 64, (20, 2, 12)), 1e-2 * torch.linspace(1, 0.5, 20, dtype=torch.float64), [], []
            optimizer = torch.optim.AdamW(adapters.values(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
            for batch, rate in zip(batches, rates):
                optimizer.param_groups[0]["lr"] = rate.item()
                optimizer.zero_grad()
                loss = model(batch, labels=batch).loss
                loss.backward()
                norms.append(torch.nn.utils.clip_grad_norm_(adapters.values(), 1.0))
                losses.append(loss.detach())
                optimizer.step()
            io |= {"trace/input_ids": batches.int(), "trace/lr": rates, "trace/loss": torch.stack(losses), "trace/norm": torch.stack(norms)}
            save_file({name: t.detach().contiguous() for name, t in io.items()}, folder / "io.safetensors")
        with contextlib.suppress(AssertionError):
            report = program("verify", self.folder, "--json", "--threads", "1")
        rows = json.loads(report)["compared"]
        self.assertGreaterEqual({row["compared"] for row in rows}, {"logits", "loss", "gradients", "training, loss", "training, norm"})
        self.assertEqual([row for row in rows if not row["ok"]], [])

    @unittest.skipUnless(PROGRAM and importlib.util.find_spec("peft"), "peft or the program is not there")
    def test_adapters_that_train_wrote_open_in_peft(self):
        """Of a model of these classes, and of transformers' own, whose merged weights are exported."""
        import peft

        text = self.folder / "text.txt"
        text.write_text("".join(random.choice(("abcd", "fgh", "kij")) for _ in range(400)))
        measured = lambda *folder: json.loads(program("eval", *folder, "--text", text, "--context", "0", "--json", "--threads", "1"))["results"][0]["nll"]  # noqa: E731
        for kind in ("own", *(("kimi_linear", "qwen3_5_moe", "qwen3_next") if RELEASED.is_dir() else ())):
            base, tuned, merged = (self.folder / f"{kind}-{name}" for name in ("base", "tuned", "merged"))
            if kind == "own":
                made(vocab_size=256, **KIMI).save_pretrained(base)
                ByteTokenizer().save_pretrained(base)
            else:
                released(kind, base)
            with self.subTest(kind=kind):
                program("train", "--from", base, "--lora", "2", "--text", text, "--out", tuned, "--lr", "1e-2", "--steps", "6", "--batch", "2", "--length", "32",
                        "--threads", "1")
                model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **({} if kind == "own" else {"experts_implementation": "eager"}))
                run_its_own_code(self, model)
                ids = torch.tensor(AutoTokenizer.from_pretrained(base)(text.read_text()).input_ids)[None]
                model = peft.PeftModel.from_pretrained(model, tuned / "model").eval()
                stored = load_file(tuned / "model/adapter_model.safetensors")
                adapters = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name}
                self.assertEqual({name: t.tolist() for name, t in stored.items()}, {name: p.tolist() for name, p in adapters.items()})
                self.assertTrue(any("experts.base_layer.lora_B" in name for name in stored))
                self.assertEqual(any("kv_b_proj.lora_B" in name for name in stored), not kind.startswith("qwen3"))
                with torch.no_grad():
                    loss = F.cross_entropy(model(ids[:, :-1], use_cache=False).logits[0].double(), ids[0, 1:], reduction="sum").item()
                self.assertAlmostEqual(measured(tuned) / loss, 1, delta=1e-5)
                self.assertAlmostEqual(measured(base, "--adapter", tuned) / loss, 1, delta=1e-5)
                self.assertLess(loss, measured(base) * 0.999)
                if kind != "own":
                    program("export", "--merge", tuned, merged)
                    self.assertAlmostEqual(measured(merged) / loss, 1, delta=1e-5)


class Folders(Case):
    def test_arguments_are_checked(self):
        model, ids = made(), torch.randint(0, 64, (2, 4))
        for pattern, call in (
            ("input_ids: expected either input_ids or inputs_embeds, got neither", lambda: model()),
            ("attention_mask: expected \\[2, 4\\] or, with a cache, more columns, got shape \\[2, 3\\]", lambda: model(ids, attention_mask=torch.ones(2, 3))),
            ("attention_mask: expected at least one token that is not padding", lambda: model(ids, attention_mask=torch.zeros(2, 4))),
            ("output_attentions: expected False", lambda: model(ids, output_attentions=True)),
            ("cache: expected a FastweightCache or None, got DynamicCache", lambda: model(ids, cache=transformers.DynamicCache())),
            ("cu_seqlens: expected \\[N \\+ 1\\] offsets that end at T", lambda: model(ids[:1], cu_seqlens=torch.tensor([0, 3]))),
            ("position_ids: expected packed sequences, whose first token is at 0, got 3", lambda: model(ids[:1], position_ids=torch.tensor([[3, 0, 1, 0]]))),
            ("layers: expected at most num_hidden_layers = 1 entries, got 2", lambda: FastweightConfig(layers=["kda", "conv"], num_hidden_layers=1)),
            ("hidden_sise: expected a key of the .* config.json, got one .* does not know \\(nearest: hidden_size\\)", lambda: FastweightConfig(hidden_sise=8)),
            ("mlp: expected one of swiglu, channel_mix, experts, none, got 'expert'", lambda: FastweightConfig(mlp="expert")),
            ("ffn.experts.top: expected one of num_experts, top_k", lambda: made(mlp="experts", ffn={"experts": {"top": 3}})),
            ("ffn.experts.groups: expected a number that divides the 8 experts", lambda: made(mlp="experts", ffn={"experts": {"groups": 3}})),
            ("ffn.experts.top_k: expected 1 to 4, .* got 5", lambda: made(mlp="experts", ffn={"experts": {"groups": 2, "top_k": 5}})),
            ("ffn.experts.shared_gate: expected False without", lambda: made(mlp="experts", ffn={"experts": {"shared_gate": True}})),
            ("ffn.experts.router: expected one of softmax, sigmoid, got 'x'", lambda: made(mlp="experts", ffn={"experts": {"router": "x"}})),
            ("mixer.mla.rank: expected one of num_heads, kv_rank", lambda: made(layers=["mla"], mixer={"mla": {"rank": 3}})),
            ("rule: ", lambda: made(layers=["mla3"])),
            ("mixer.window.windw: expected one of window, num_heads", lambda: made(layers=["window"], mixer={"window": {"windw": 3}})),
            ("mixer.attention.num_kv_heads: expected a number that divides the 2", lambda: made(layers=["attention"], mixer={"attention": {"num_kv_heads": 3}})),
        ):
            with self.subTest(pattern=pattern), self.assertRaisesRegex(Error, pattern):
                call()

    def test_bytes_are_tokens(self):
        tokenizer = ByteTokenizer()
        tokenizer.save_pretrained(self.folder)
        made(vocab_size=256).config.save_pretrained(self.folder)
        self.assertEqual(json.loads((self.folder / "tokenizer.json").read_text()), {"type": "bytes"})
        for one in (tokenizer, AutoTokenizer.from_pretrained(self.folder)):
            self.assertIsInstance(one, ByteTokenizer)
            for _ in range(200):
                text = "".join(random.choice("a \n\0\té€𝄞\r ") for _ in range(random.randrange(12)))
                self.assertEqual(one(text).input_ids, list(text.encode()))
                self.assertEqual(one.decode(one(text).input_ids), text)
                self.assertEqual(one.decode(one(text).input_ids, skip_special_tokens=True), text.replace("\0", ""))
            batch = one(["a", "bc"], padding=True)
            self.assertEqual((batch.input_ids, batch.attention_mask), ([[0, 97], [98, 99]], [[0, 1], [1, 1]]))
            self.assertEqual((len(one), one.decode([255, 104])), (256, "\ufffdh"))

    def test_chat_templates_of_a_folder(self):
        import tokenizers

        marks = ["<|im_start|>", "<|im_end|>"]
        template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        template += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
        said = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        made(vocab_size=300).config.save_pretrained(self.folder)
        (self.folder / "chat_template.jinja").write_text(template)
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
        inner.pre_tokenizer, inner.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
        inner.add_special_tokens(marks)
        for kind in ("bytes", "file"):
            if kind == "bytes":
                ByteTokenizer(extra_special_tokens=marks).save_pretrained(self.folder)
                (self.folder / "chat_template.jinja").write_text(template)
            else:
                (self.folder / "tokenizer_config.json").unlink(missing_ok=True)
                inner.save(str(self.folder / "tokenizer.json"))
            for _ in range(2):  # as it is read, and as it is saved
                tokenizer = AutoTokenizer.from_pretrained(self.folder)
                message = [{"role": "user", "content": "hi"}]
                with self.subTest(kind=kind):
                    self.assertEqual(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True), said)
                    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
                    self.assertEqual(ids, tokenizer(said, add_special_tokens=False).input_ids)
                    self.assertEqual(len(ids), len(said) - sum(len(m) - 1 for m in marks) - len(marks[0]) + 1)
                tokenizer.save_pretrained(self.folder)

    def test_other_tokenizers_of_a_folder(self):
        import tokenizers

        made(vocab_size=3).config.save_pretrained(self.folder)
        inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
        inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        inner.save(str(self.folder / "tokenizer.json"))
        self.assertEqual(AutoTokenizer.from_pretrained(self.folder)("b a c").input_ids, [1, 0, 2])
        (self.folder / "tokenizer.json").write_text(json.dumps({"type": "ids"}))
        with self.assertRaisesRegex(Error, "expected .*bytes.* or a file of Hugging Face's tokenizers, got ids"):
            AutoTokenizer.from_pretrained(self.folder)

    @unittest.skipIf(SHORT, "a process that imports transformers")
    def test_another_program_runs_with_the_classes(self):
        (self.folder / "program.py").write_text("import sys, transformers; print(sys.argv[1], transformers.AutoConfig.for_model('fastweight').rule)")
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-W", "ignore", "-m", "fastweight.models", "program", "word"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
        self.assertEqual(done.stdout.split(), ["word", "gated_deltanet2"], done.stderr)


if __name__ == "__main__":
    unittest.main()
