"""The call conventions of vLLM and SGLang (pools, slots, device offsets, speculative indices) against loops over sequences, and their registration in small copies of
the interfaces that python/fastweight/vllm.py and sglang.py name. The servers themselves are not run."""

import importlib
import pathlib
import sys
import types
import unittest
from unittest import mock

import torch
import torch.nn.functional as F

from fastweight import sglang, vllm
from fastweight.torch import _serving, pools
from reference import recurrence

RULE = "decay=scalar gain=gate q_norm=l2 k_norm=l2"
H, HV, K, V, SLOTS = 2, 4, 8, 12, 9


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), device="cpu").to(torch.get_default_device())


def on_device(test):
    torch.set_default_device(DEVICE)
    test.addCleanup(torch.set_default_device, None)


def formed(a, b, A_log, dt_bias):
    return {"g": -A_log.exp() * F.softplus(a + dt_bias), "beta": b.sigmoid()}


def tokens(T, seed=0):
    return {"q": rand(1, T, H, K, seed=seed), "k": rand(1, T, H, K, seed=seed + 1), "v": rand(1, T, HV, V, seed=seed + 2)}


def alone(named, state):
    """o, and the state [HV, V, K] after every token, of one sequence in float64."""
    S, outputs, states = state.double().mT[None], [], []
    for t in range(named["v"].shape[1]):
        o, S, _ = recurrence(RULE, {name: x[:, t : t + 1].double() for name, x in named.items()}, S)
        outputs.append(o[0, 0])
        states.append(S[0].mT)
    return outputs, states


class Conventions(unittest.TestCase):
    def setUp(self):
        on_device(self)
        self.A_log, self.dt_bias = rand(HV), rand(HV, seed=5)
        # A pool is one layer's part of a larger one: its slots lie apart.
        self.pool = rand(SLOTS, 2, HV, V, K)[:, 1]
        self.before = self.pool.clone()

    def near(self, a, b, tolerance=1e-5):
        self.assertEqual(a.shape, b.shape)
        self.assertLess(float((a.double() - b.double()).abs().max()), tolerance)

    def decoded(self, o, named, slots, first):
        """o [N, HV, V] and the pool after one token of each."""
        expected = self.before.double()
        for n, slot in enumerate(slots):
            if slot < first:
                self.assertEqual(float(o[n].abs().max()), 0)
                continue
            outputs, states = alone({name: x[:, n : n + 1] for name, x in named.items()}, self.before[slot])
            self.near(o[n], outputs[0])
            expected[slot] = states[0]
        self.near(self.pool, expected)

    def test_vllm_decode_skips_slots_of_zero_and_below_and_zeroes_their_outputs(self):
        slots = [3, 0, 7, -1, 1]
        n = tokens(5)
        a, b = rand(5, HV), rand(5, HV, seed=7)
        row = torch.cat([n[name][0].flatten(1) for name in ("q", "k", "v")], dim=1)
        for dtype in (torch.int32, torch.int64):
            self.pool.copy_(self.before)
            out = torch.full((5, 1, HV, V), 1e30)
            o = vllm.decode(row, a, b, self.A_log, self.dt_bias, self.pool, torch.tensor(slots, dtype=dtype), out=out)
            self.assertIs(o, out)
            self.decoded(o[:, 0], {**n, **formed(a[None], b[None], self.A_log, self.dt_bias)}, slots, 1)

    def test_sglang_decode_skips_negative_slots_alone(self):
        slots = [0, -1, 8, 4]
        n = tokens(4)
        a, b = rand(4, HV), rand(4, HV, seed=7)
        named = {**n, **formed(a[None], b[None], self.A_log, self.dt_bias)}
        call = {"A_log": self.A_log, "dt_bias": self.dt_bias, "ssm_states": self.pool, "cache_indices": torch.tensor(slots, dtype=torch.int32)}
        o = sglang.decode(n["q"], n["k"], n["v"], a, b, query_start_loc=torch.arange(5), **call)
        self.decoded(o[0], named, slots, 0)
        self.pool.copy_(self.before)
        row = torch.cat([n[name][0].flatten(1) for name in ("q", "k", "v")], dim=1)
        o = sglang.packed_decode(row, a, b, scale=K**-0.5, num_v_heads=HV, head_v_dim=V, **call)
        self.decoded(o[0], named, slots, 0)

    def test_a_bfloat16_pool_keeps_its_type(self):
        pool = self.before.bfloat16()
        n = tokens(2)
        call = {"A_log": self.A_log, "dt_bias": self.dt_bias, "cache_indices": torch.tensor([2, 5])}
        o = sglang.decode(n["q"], n["k"], n["v"], rand(2, HV), rand(2, HV, seed=7), ssm_states=pool, **call)
        named = {**n, **formed(rand(2, HV)[None], rand(2, HV, seed=7)[None], self.A_log, self.dt_bias)}
        for i, slot in enumerate((2, 5)):
            outputs, states = alone({name: x[:, i : i + 1] for name, x in named.items()}, self.before.bfloat16()[slot])
            self.near(o[0, i], outputs[0])
            self.assertTrue(torch.equal(pool[slot], states[0].float().bfloat16()) or float((pool[slot].double() - states[0]).abs().max()) < 2e-2)
        self.assertTrue(torch.equal(pool[3], self.before.bfloat16()[3]))

    def test_extend_reads_and_writes_the_pool(self):
        lengths, slots = [5, 0, 70, 1, 3], [4, 2, 0, 8, -1]
        n = tokens(sum(lengths))
        gates = {"g": -rand(1, sum(lengths), HV).abs(), "beta": rand(1, sum(lengths), HV).sigmoid()}
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        for update in (True, False):
            self.pool.copy_(self.before)
            o, state, middle = sglang.extend(n["q"], n["k"], n["v"], **gates, ssm_states=self.pool, cache_indices=torch.tensor(slots, dtype=torch.int32),
                                             query_start_loc=offsets, inplace_update=update)
            self.assertEqual((state, middle), (None, None))
            expected = self.before.double()
            for i, slot in enumerate(slots):
                part = slice(int(offsets[i]), int(offsets[i + 1]))
                if slot < 0:
                    self.assertEqual(float(o[:, part].abs().max()), 0)
                elif lengths[i] > 0:
                    outputs, states = alone({name: x[:, part] for name, x in {**n, **gates}.items()}, self.before[slot])
                    self.near(o[0, part], torch.stack(outputs))
                    expected[slot] = states[-1]
            self.near(self.pool, expected if update else self.before)

    def test_extend_begins_at_nothing_where_there_is_no_state_yet(self):
        n = {**tokens(6), "g": -rand(1, 6, HV).abs(), "beta": rand(1, 6, HV).sigmoid()}
        o = pools.extend(RULE, **n, pool=self.pool, slots=torch.tensor([1, 2]), cu_seqlens=torch.tensor([0, 2, 6]), has_state=torch.tensor([True, False]))
        for part, state in ((slice(0, 2), self.before[1]), (slice(2, 6), torch.zeros(HV, V, K))):
            self.near(o[0, part], torch.stack(alone({name: x[:, part] for name, x in n.items()}, state)[0]))

    def test_vllm_prefill_takes_gathered_states(self):
        n = {**tokens(9), "g": -rand(1, 9, HV).abs(), "beta": rand(1, 9, HV).sigmoid()}
        n["q"], n["k"] = F.normalize(n["q"], dim=-1), F.normalize(n["k"], dim=-1)
        for normed in (True, False):
            o, states = vllm.prefill(**n, initial_state=self.before[[1, 3]], output_final_state=True, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32),
                                     use_qk_l2norm_in_kernel=normed)
            for i, (part, slot) in enumerate(((slice(0, 4), 1), (slice(4, 9), 3))):
                outputs, after = alone({name: x[:, part] for name, x in n.items()}, self.before[slot])
                self.near(o[0, part], torch.stack(outputs))
                self.near(states[i], after[-1])

    def test_vllm_speculation_begins_at_the_accepted_token_and_keeps_every_state(self):
        indices = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 0, 0], [8, 7, 0]], dtype=torch.int32)
        accepted = torch.tensor([2, 1, 1, 2], dtype=torch.int32)
        lengths = [3, 2, 1, 2]
        T = sum(lengths)
        n = {**tokens(T), "g": -rand(1, T, HV).abs(), "beta": rand(1, T, HV).sigmoid()}
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        o = vllm.speculative(n["q"], n["k"], n["v"], n["g"], n["beta"], self.pool, indices, accepted, offsets)
        expected = self.before.double()
        for i in range(4):
            part = slice(int(offsets[i]), int(offsets[i + 1]))
            begin = int(indices[i, accepted[i] - 1])
            if begin <= 0:
                self.assertEqual(float(o[:, part].abs().max()), 0)
                continue
            outputs, states = alone({name: x[:, part] for name, x in n.items()}, self.before[begin])
            self.near(o[0, part], torch.stack(outputs))
            for t, state in enumerate(states):
                expected[indices[i, t]] = state
        self.near(self.pool, expected)

    def test_sglang_verification_leaves_the_pool_and_fills_the_buffer(self):
        slots, places, lengths = [3, -1, 0], [1, 2, 0], [3, 2, 1]
        T = sum(lengths)
        n = tokens(T)
        a, b = rand(T, HV), rand(T, HV, seed=7)
        named = {**n, **formed(a[None], b[None], self.A_log, self.dt_bias)}
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        call = {"ssm_states": self.pool, "cache_indices": torch.tensor(slots, dtype=torch.int32), "query_start_loc": offsets,
                "intermediate_state_indices": torch.tensor(places, dtype=torch.int32), "cache_steps": 4}
        for raw in (False, True):
            buffer = torch.full((4, 4, HV, V, K), 7.0)
            expected = buffer.double()
            if raw:
                o = sglang.target_verify_raw(self.A_log, self.dt_bias, n["q"], n["k"], n["v"], a, b, intermediate_states_buffer=buffer, **call)
            else:
                o = sglang.target_verify(**named, intermediate_states_buffer=buffer, **call)
            for i, slot in enumerate(slots):
                part = slice(int(offsets[i]), int(offsets[i + 1]))
                if slot < 0:
                    self.assertEqual(float(o[:, part].abs().max()), 0)
                    continue
                outputs, states = alone({name: x[:, part] for name, x in named.items()}, self.before[slot])
                self.near(o[0, part], torch.stack(outputs))
                for t, state in enumerate(states):
                    expected[places[i], t] = state
            self.near(buffer, expected)
            self.assertTrue(torch.equal(self.pool, self.before))

    def test_states_rounded_after_every_token_are_what_the_next_sees(self):
        n = {**tokens(3), "g": -rand(1, 3, HV).abs(), "beta": rand(1, 3, HV).sigmoid()}
        kept = {}
        o = pools.verify(RULE, **n, pool=self.pool, slots=torch.tensor([2]), cu_seqlens=torch.tensor([0, 3]), steps=3, round_to=torch.bfloat16,
                         store=lambda t, states, there: kept.__setitem__(t, states.clone()), per_token=("g", "beta"))
        state = self.before[2]
        for t in range(3):
            outputs, states = alone({name: x[:, t : t + 1] for name, x in n.items()}, state)
            self.near(o[0, t], outputs[0])
            self.assertLess(float((kept[t][0].double() - states[0]).abs().max()), 2e-2)
            state = kept[t][0]
            self.assertTrue(torch.equal(state, state.bfloat16().float()))

    def test_what_takes_other_kernels_is_refused_by_name(self):
        n = {**tokens(2), "g": -rand(1, 2, HV).abs(), "beta": rand(1, 2, HV).sigmoid()}
        call = {"ssm_states": self.pool, "cache_indices": torch.tensor([1]), "query_start_loc": torch.tensor([0, 2])}
        with self.assertRaisesRegex(_serving.NotServed, "retrieve_parent_token: a tree of drafted tokens"):
            sglang.target_verify(**n, **call, intermediate_states_buffer=None, intermediate_state_indices=None, cache_steps=2,
                                 retrieve_parent_token=torch.zeros(1))
        with self.assertRaisesRegex(_serving.NotServed, "replayssm_d: not served, got Tensor"):
            sglang.packed_decode(rand(1, 80), rand(1, HV), rand(1, HV), A_log=self.A_log, dt_bias=self.dt_bias, scale=1.0, ssm_states=self.pool,
                                 cache_indices=torch.tensor([1]), num_v_heads=HV, head_v_dim=V, replayssm_d=rand(1))
        with self.assertRaisesRegex(_serving.NotServed, "q: expected one token a sequence, got 2 tokens of 1"):
            sglang.decode(n["q"], n["k"], n["v"], rand(2, HV), rand(2, HV), A_log=self.A_log, dt_bias=self.dt_bias, **call)
        with self.assertRaisesRegex(ValueError, r"pool: expected \[slots, HV, V, K\]"):
            pools.decode(RULE, *[n[x].transpose(0, 1) for x in "qkv"], self.pool.mT, torch.tensor([1, 2]), g=n["g"].transpose(0, 1), beta=n["beta"].transpose(0, 1))
        with self.assertRaisesRegex(ValueError, "mixed_qkv: expected"):
            vllm.decode(rand(1, 81), rand(1, HV), rand(1, HV), self.A_log, self.dt_bias, self.pool, torch.tensor([1]))


def modules(**named):
    """Patches sys.modules with empty modules of these (dotted) names and what they have."""
    made = {}
    for name, members in named.items():
        parts = name.replace("__", ".").split(".")
        for i in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        made[".".join(parts)].__dict__.update(members)
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    return mock.patch.dict(sys.modules, made)


class EntryPoints(unittest.TestCase):
    def test_those_of_the_wheel_are_functions_that_do_nothing_here(self):
        file = pathlib.Path(__file__).parents[2] / "python/pyproject.toml"
        if sys.version_info < (3, 11) or not file.exists():
            self.skipTest("no tomllib, or not in the source tree")
        points = importlib.import_module("tomllib").loads(file.read_text())["project"]["entry-points"]
        self.assertEqual(set(points), {"vllm.general_plugins", "sglang.srt.plugins"})
        for names in points.values():
            module, _, function = names["fastweight"].partition(":")
            with mock.patch.dict("os.environ", {"FASTWEIGHT_VLLM": "0", "FASTWEIGHT_SGLANG": ""}):
                self.assertFalse(getattr(importlib.import_module(module), function)())


class VllmRegistration(unittest.TestCase):
    def setUp(self):
        class CustomOp:  # what register_oot's facts say: by the class's name, once, and the instance is of the registered class
            op_registry_oot = {}

            def __new__(cls, *args, **kwargs):
                return super().__new__(cls.op_registry_oot.get(cls.__name__, cls))

            @classmethod
            def register_oot(cls, name):
                def decorator(ours):
                    assert name not in cls.op_registry_oot, "twice"
                    cls.op_registry_oot[name] = ours
                    return ours

                return decorator

            def __call__(self, *args, **kwargs):
                return self._forward_method(*args, **kwargs)

        class ChunkGatedDeltaRule(CustomOp):
            def __init__(self):
                self._forward_method = self.forward_native

            def forward_native(self, *args, **kwargs):
                return "theirs"

        on_device(self)
        self.base, self.registry = ChunkGatedDeltaRule, CustomOp.op_registry_oot
        patch = modules(vllm__model_executor__custom_op={"CustomOp": CustomOp},
                        vllm__model_executor__layers__mamba__gdn__qwen_gdn_linear_attn={"ChunkGatedDeltaRule": ChunkGatedDeltaRule})
        patch.start()
        self.addCleanup(patch.stop)

    def call(self, **more):
        n = {**tokens(4), "g": -rand(1, 4, HV).abs(), "beta": rand(1, 4, HV).sigmoid()}
        return self.base()(**n, initial_state=torch.zeros(1, HV, V, K), output_final_state=True, cu_seqlens=torch.tensor([0, 4]), **more)

    def test_inert_unless_switched_on(self):
        with mock.patch.dict("os.environ"):
            sys.modules["os"].environ.pop("FASTWEIGHT_VLLM", None)
            self.assertFalse(vllm.register())
        self.assertEqual(self.call(), "theirs")

    def test_registered_once_and_what_is_not_served_is_theirs(self):
        with mock.patch.dict("os.environ", {"FASTWEIGHT_VLLM": "1"}):
            self.assertTrue(vllm.register() and vllm.register())
        self.assertEqual(list(self.registry), ["ChunkGatedDeltaRule"])
        self.assertTrue(issubclass(self.registry["ChunkGatedDeltaRule"], self.base))
        o, state = self.call()
        self.assertEqual((o.shape, state.shape), ((1, 4, HV, V), (1, HV, V, K)))
        self.assertEqual(self.call(core_attn_out=torch.zeros(1)), "theirs")
        with mock.patch.dict("os.environ", {"FASTWEIGHT_STRICT": "1"}), self.assertRaisesRegex(_serving.NotServed, "core_attn_out: not served"):
            self.call(core_attn_out=torch.zeros(1))

    def test_another_vllm_is_an_error_that_says_so(self):
        del sys.modules["vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"].ChunkGatedDeltaRule
        with mock.patch.dict("os.environ", {"FASTWEIGHT_VLLM": "1"}), self.assertRaisesRegex(ImportError, "expected a vLLM with ChunkGatedDeltaRule"):
            vllm.register()


class SglangRegistration(unittest.TestCase):
    def test_methods_are_replaced_only_when_switched_on(self):
        class TritonGDNKernel:
            def decode(self, q, k, v, a, b, **kwargs):
                return "theirs"

            def extend(self, q, k, v, g, beta, **kwargs):
                return "theirs"

            def target_verify(self, A_log, dt_bias, q, k, v, a, b, **kwargs):
                return "theirs"

        on_device(self)
        n = tokens(2)
        call = {"A_log": rand(HV), "dt_bias": rand(HV), "ssm_states": rand(SLOTS, HV, V, K), "cache_indices": torch.tensor([1, 2]),
                "query_start_loc": torch.arange(3)}
        with modules(sglang__srt__layers__attention__linear__kernels__gdn_triton={"TritonGDNKernel": TritonGDNKernel}):
            with mock.patch.dict("os.environ", {"FASTWEIGHT_SGLANG": "0"}):
                self.assertFalse(sglang.register())
            self.assertEqual(TritonGDNKernel().decode(n["q"], n["k"], n["v"], rand(2, HV), rand(2, HV), **call), "theirs")
            with mock.patch.dict("os.environ", {"FASTWEIGHT_SGLANG": "1"}):
                self.assertTrue(sglang.register() and sglang.register())
            self.assertEqual(TritonGDNKernel().decode(n["q"], n["k"], n["v"], rand(2, HV), rand(2, HV), **call).shape, (1, 2, HV, V))
            self.assertEqual(TritonGDNKernel().decode(n["q"], n["k"], n["v"], rand(2, HV), rand(2, HV), replayssm_d=rand(1), **call), "theirs")
            buffer = torch.zeros(3, 2, HV, V, K)
            o = TritonGDNKernel().target_verify(call["A_log"], call["dt_bias"], n["q"], n["k"], n["v"], rand(2, HV), rand(2, HV), ssm_states=call["ssm_states"],
                                                cache_indices=torch.tensor([4]), query_start_loc=torch.tensor([0, 2]), intermediate_states_buffer=buffer,
                                                intermediate_state_indices=torch.tensor([1]), cache_steps=2, retrieve_parent_token=None)
            self.assertEqual(o.shape, (1, 2, HV, V))
            self.assertGreater(float(buffer[1].abs().min()), 0)
            self.assertEqual(float(buffer[0].abs().max()), 0)

    def test_without_the_server_the_message_names_it(self):
        with modules(sglang={}), mock.patch.dict("os.environ", {"FASTWEIGHT_SGLANG": "1"}), self.assertRaisesRegex(ImportError, "expected an SGLang with"):
            sglang.register()


if __name__ == "__main__":
    unittest.main()
