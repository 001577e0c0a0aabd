"""fastweight.torch against a plain torch loop: values, gradients, packing, types, what is refused."""

import ctypes.util
import inspect
import unittest
import unittest.mock
from unittest import mock

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import fastweight
import fastweight.torch as fwt
from fastweight import _library
from fastweight.torch import _calls, _plans
from reference import random_inputs, recurrence

COMPOSED = [
    "decay=channel gain=longhorn feedback=fixed lambda=0.3 read=corrected q_norm=l2 k_norm=l2",
    "decay=scalar gain=gate erase_key=own write=scalar q_norm=l2 k_norm=l2",
    "decay=channel erase=scalar write=channel precond=diagonal precond_form=squash_low gain=gate q_norm=l2 k_norm=l2",
    "update=additive decay=scalar gain=gate precond=read precond_form=inverse normaliser=one_plus k_norm=l2",
]
ALL = fastweight.rule_names() + ["gated_deltanet2_b_only", "precond_norm_gated", "precond_exact"] + COMPOSED


def states(rule, inputs, n):
    q, v = inputs["q"], inputs["v"]
    generator = torch.Generator().manual_seed(7)
    state = torch.randn(n, v.shape[2], q.shape[3], v.shape[3], generator=generator, dtype=torch.float64) * 0.3
    precond = torch.rand(n, q.shape[2], q.shape[3], generator=generator, dtype=torch.float64)
    return (state, precond) if _calls.uses_precond(rule) else (state, None)


def gradients(out, inputs, weights):
    loss = sum((x * w.to(x.dtype)).sum() for x, w in zip(out, weights) if x is not None)
    return torch.autograd.grad(loss, inputs)


def weights_like(out):
    generator = torch.Generator().manual_seed(9)
    return [None if x is None else torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in out]


class Recurrence(unittest.TestCase):
    def assertNear(self, found, expected, tolerance, what):
        found, expected = found.detach().double(), expected.detach().double()
        size = expected.abs().max().clamp_min(1e-3)
        self.assertEqual(found.shape, expected.shape, what)
        self.assertLessEqual(float((found - expected).abs().max() / size), tolerance, what)

    def test_every_rule_and_composed_ones_equal_the_loop_in_values_and_gradients(self):
        for rule in ALL:
            with self.subTest(rule=rule):
                named = random_inputs(rule)
                state, precond = states(rule, named, 2)
                leaves = [x.requires_grad_() for x in (*named.values(), state, precond) if x is not None]
                expected = recurrence(rule, named, state, precond)
                found = fwt.forward(rule, **{"k": None, **named}, initial_state=state, initial_precond=precond, output_final_state=True)
                weights = weights_like(expected)
                for name, a, b in zip(found._fields, found, expected):
                    self.assertEqual(a is None, b is None, name)
                    if b is not None:
                        self.assertNear(a, b, 1e-11, name)
                for a, b in zip(gradients(found, leaves, weights), gradients(expected, leaves, weights)):
                    self.assertNear(a, b, 1e-9, "gradient")

    def test_gradcheck_against_central_differences(self):
        for rule in ("gated_deltanet", "kda", "gated_deltanet2", "comba", "precond_longhorn", "hgrn2", "retnet", "qdelta"):
            named = random_inputs(rule, B=1, T=5, H=1, HV=2, K=3, V=4)
            state, precond = states(rule, named, 1)
            names = list(named)
            values = [x.requires_grad_() for x in (*named.values(), state) + ((precond,) if precond is not None else ())]

            def call(*tensors):
                extra = {"initial_state": tensors[len(names)], "initial_precond": tensors[len(names) + 1] if precond is not None else None}
                out = fwt.forward(rule, **{"k": None, **dict(zip(names, tensors))}, **extra, output_final_state=True)
                return tuple(x for x in out if x is not None)

            with self.subTest(rule=rule):
                self.assertTrue(torch.autograd.gradcheck(call, values, atol=1e-6, rtol=1e-5))

    def test_packed_sequences_equal_each_alone(self):
        for rule in ("gated_deltanet", "kda", "precond_gated_deltanet"):
            lengths = [5, 0, 70, 1]
            named = random_inputs(rule, B=1, T=sum(lengths), H=2, HV=2)
            state, precond = states(rule, named, len(lengths))
            leaves = [x.requires_grad_() for x in (*named.values(), state) if x.dim() > 1]
            offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
            for dtype in (torch.int32, torch.int64):
                out = fwt.forward(rule, **named, initial_state=state, initial_precond=precond, output_final_state=True, cu_seqlens=torch.tensor(offsets, dtype=dtype))
                alone = []
                for n in range(len(lengths)):
                    part = {name: x[:, offsets[n] : offsets[n + 1]] if x.dim() > 1 else x for name, x in named.items()}
                    alone.append(fwt.forward(rule, **part, initial_state=state[n : n + 1], initial_precond=None if precond is None else precond[n : n + 1], output_final_state=True))
                expected = [torch.cat([x[0] for x in alone], 1), torch.cat([x[1] for x in alone]), None if precond is None else torch.cat([x[2] for x in alone])]
                self.assertTrue(torch.equal(out.o, expected[0]) and torch.equal(out.final_state, expected[1]), rule)
                weights = weights_like(expected)
                for a, b in zip(gradients(out, leaves, weights), gradients(expected, leaves, weights)):
                    self.assertNear(a, b, 1e-12, rule)

    def test_the_decode_form_has_the_bits_of_steps_and_gradients_in_chunks(self):
        for rule in ("gated_deltanet", "kda", "precond_gated_deltanet", "dplr"):
            named = {name: x.float().requires_grad_() for name, x in random_inputs(rule, T=70, H=2, HV=2).items()}
            former = fwt.set_form("decode")
            try:
                out = fwt.forward(rule, **named)
                self.assertIn("form: decode", fwt.plan_text(rule, **named))
            finally:
                fwt.set_form(former)
            self.assertTrue(torch.equal(out.o, fwt.forward(rule, **named, form="decode").o), rule)
            state, precond = (x if x is None else torch.zeros_like(x, dtype=torch.float32) for x in states(rule, named, 2))
            with torch.no_grad():
                o = [fwt.step(rule, state=state, precond_state=precond, **{n: x if x.dim() == 1 else x[:, t : t + 1] for n, x in named.items()}) for t in range(70)]
            self.assertTrue(torch.equal(out.o, torch.cat(o, 1)), rule)
            weights = weights_like(out)
            found, expected = (gradients(x, list(named.values()), weights) for x in (out, fwt.forward(rule, **named)))
            for name, a, b in zip(named, found, expected):
                self.assertNear(a, b, 1e-4, f"{rule} {name}")
        with self.assertRaisesRegex(fwt.Error, "form: expected one of auto, token, chunk, decode, got 'fast'"):
            fwt.set_form("fast")

    def test_a_bound_of_the_lengths_leaves_offsets_on_a_device_where_they_are(self):
        named = random_inputs("gated_deltanet", B=1, T=37)
        offsets = torch.tensor([0, 12, 37], dtype=torch.int32)
        known = fwt.forward("gated_deltanet", **named, cu_seqlens=offsets)
        self.assertTrue(torch.equal(fwt.forward("gated_deltanet", **named, cu_seqlens=offsets, max_seqlen=30).o, known.o))  # of the CPU: read as ever
        for wrong in (0, -1, 1.5, True):
            with self.assertRaisesRegex(fwt.Error, "max_seqlen: expected a whole number above 0 or None"):
                fwt.forward("gated_deltanet", **named, cu_seqlens=offsets, max_seqlen=wrong)
        # What a CUDA call is planned from: the address, and never what lies there.
        config = _plans.Config("gated_deltanet", bf16_operands=True, max_seqlen=30)
        shapes = _plans.Shapes(1, 1000, 2, 2, 64, 64)
        plans = [_plans.descriptor(config, shapes, torch.bfloat16, torch.bfloat16, torch.device("cuda:0"), _plans.DeviceOffsets(t, 30)) for t in (offsets, offsets.long())]
        for desc, width in zip(plans, (32, 64)):
            self.assertEqual((desc.seqlens.bits, desc.seqlens.num_sequences, desc.seqlens.max_seqlen, desc.seqlens.memory), (width, 2, 30, 1))
            try:
                self.assertGreater(_plans.sizes_of(desc).saved, 0)
            except fwt.DeviceError as error:  # a library with kernels asks the device that the plan is for
                self.assertFalse(torch.cuda.is_available(), error)
                self.assertRegex(str(error), "device_number: expected -1 or the number of an NVIDIA GPU")
        self.assertEqual(plans[0].seqlens.cu_seqlens, offsets.data_ptr())

    def test_pools_are_read_and_written_at_slots(self):
        for rule in ("kda", "precond_gated_deltanet"):
            named = {name: x.float() for name, x in random_inputs(rule, B=1, T=9, H=2, HV=2).items()}
            pool, precond = (x if x is None else x.float() for x in states(rule, named, 6))
            offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
            alone = fwt.forward(rule, **named, initial_state=torch.stack([pool[3], torch.zeros_like(pool[0])]), output_final_state=True, cu_seqlens=offsets,
                                initial_precond=None if precond is None else torch.stack([precond[3], torch.zeros_like(precond[0])]))
            after, after_precond = pool.clone(), None if precond is None else precond.clone()
            o = fwt.prefill(rule, **named, state=after, precond_state=after_precond, slots=torch.tensor([3, -1], dtype=torch.int32),
                            final_slots=torch.tensor([3, 1], dtype=torch.int32), cu_seqlens=offsets)
            self.assertTrue(torch.equal(o, alone.o) and torch.equal(after[[3, 1]], alone.final_state) and torch.equal(after[[0, 2, 4, 5]], pool[[0, 2, 4, 5]]))
            # The same tokens drafted: the state after the last of each is where the sequence ends.
            drafted, drafted_precond = pool.clone(), None if precond is None else precond.clone()
            drafted[1] = 0
            if precond is not None:
                drafted_precond[1] = 0
            places = torch.tensor([[-1, -1, -1, 4, -1], [-1, 5, -1, -1, 0]], dtype=torch.int32)
            o = fwt.speculate(rule, **named, state=drafted, precond_state=drafted_precond, token_slots=places, slots=torch.tensor([3, 1], dtype=torch.int32),
                              cu_seqlens=offsets)
            self.assertNear(o.double(), alone.o.double(), 1e-5, rule)
            self.assertNear(drafted[[4, 0]].double(), alone.final_state.double(), 1e-5, rule)
            self.assertTrue(torch.equal(drafted[3], pool[3]))
            with self.assertRaisesRegex(fwt.Error, "token_slots: expected contiguous int32 of 2 dimensions"):
                fwt.speculate(rule, **named, state=drafted, precond_state=drafted_precond, token_slots=places.long(), cu_seqlens=offsets)
            with self.assertRaisesRegex(fwt.Error, "slots: expected 2 rows"):
                fwt.prefill(rule, **named, state=drafted, precond_state=drafted_precond, slots=places[0], cu_seqlens=offsets)

    def test_a_ring_replays_what_steps_do(self):
        for rule in ("kda", "gated_deltanet", "precond_gated_deltanet"):
            named = {name: x.float() for name, x in random_inputs(rule, B=2, T=20, H=2, HV=2).items()}
            whole = fwt.forward(rule, **named, output_final_state=True, form="token")
            part = lambda begin, end: {n: x if x.dim() == 1 else x[:, begin:end] for n, x in named.items()}
            fresh = lambda: [x if x is None else torch.zeros_like(x, dtype=torch.float32) for x in states(rule, named, 2)]

            def replayed(tokens, per_call, takes_back=False, last=20):
                state, precond = fresh()
                ring = fwt.ring(rule, state, tokens=tokens, most_tokens=per_call, takes_back=takes_back)
                self.assertEqual([stride % 4 for stride in ring.stride()], [0, 0, 0, 1], rule)
                positions, previous, o, done = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), [], 0
                while done < last:
                    stay = min(per_call, last - done)
                    now = fwt.replay(rule, **part(done, done + stay), state=state, ring=ring, positions=positions, precond_state=precond, tokens=tokens,
                                     previous=previous if takes_back else None)
                    if takes_back:
                        stay = max(stay - done % 2, 1)  # of a call that begins at an odd token the last one is taken back
                    o.append(now[:, :stay])
                    previous.copy_(positions)
                    positions += stay
                    done += stay
                return torch.cat(o, 1), state, precond, ring, positions

            state, precond = fresh()
            steps = torch.cat([fwt.step(rule, **part(t, t + 1), state=state, precond_state=precond) for t in range(20)], 1)
            o, folded, *_ = replayed(1, 1)
            self.assertTrue(torch.equal(o, steps) and torch.equal(folded, state), rule)
            o = replayed(6, 1)[0]
            self.assertNear(o.double(), whole.o.double(), 1e-5, rule)
            self.assertTrue(torch.equal(replayed(6, 3)[0], o), rule)
            if precond is None:
                self.assertTrue(torch.equal(replayed(6, 3, takes_back=True)[0], o), rule)
            o, folded, made, ring, positions = replayed(6, 1, last=10)
            rest = fwt.prefill(rule, **part(10, 20), state=folded, precond_state=made, slots=torch.arange(2, dtype=torch.int32), ring=ring, ring_tokens=6, positions=positions)
            self.assertNear(torch.cat([o, rest], 1).double(), whole.o.double(), 1e-5, rule)
            self.assertNear(folded.double(), whole.final_state.double(), 1e-5, rule)
            one = dict(part(0, 1), state=folded, precond_state=made)
            with self.assertRaisesRegex(fwt.Error, "positions: expected contiguous int32 of 1 dimensions"):
                fwt.replay(rule, **one, ring=ring, positions=positions.long(), tokens=6)
            with self.assertRaisesRegex(fwt.Error, "ring: expected torch.float32 of four dimensions"):
                fwt.replay(rule, **one, ring=ring[0], positions=positions, tokens=6)
            with self.assertRaisesRegex(fwt.Error, "ring.rows: expected 7 to 4096"):
                fwt.replay(rule, **one, ring=ring, positions=positions, tokens=7)

    def test_states_on_the_way_are_copied_to_slots(self):
        for rule in ("kda", "precond_gated_deltanet"):
            named = {name: x.float() for name, x in random_inputs(rule, B=1, T=200, H=2, HV=2).items()}
            pool, precond = (x if x is None else x.float() for x in states(rule, named, 6))
            offsets, slots = torch.tensor([0, 60, 200], dtype=torch.int32), torch.tensor([3, -1], dtype=torch.int32)
            places = torch.tensor([[0, 0], [5, 4]], dtype=torch.int32)  # the first sequence has none
            same = {"cu_seqlens": offsets, "slots": slots, "update": False, "form": "chunk"}
            after, after_precond = pool.clone(), None if precond is None else precond.clone()
            o = fwt.prefill(rule, **named, state=after, precond_state=after_precond, checkpoint_interval=64, checkpoint_slots=places, **same)
            self.assertTrue(torch.equal(o, fwt.prefill(rule, **named, state=pool, precond_state=precond, **same)))
            self.assertTrue(torch.equal(after[:4], pool[:4]))
            for slot, end in ((5, 124), (4, 188)):
                part = {name: x if name == "precond_center" else x[:, 60:end] for name, x in named.items()}
                alone = fwt.forward(rule, **part, output_final_state=True, form="chunk")
                self.assertTrue(torch.equal(after[slot], alone.final_state[0]), rule)
                self.assertTrue(precond is None or torch.equal(after_precond[slot], alone.final_precond[0]), rule)
            with self.assertRaisesRegex(fwt.Error, "checkpoint_interval: expected a number together with checkpoint_slots"):
                fwt.prefill(rule, **named, state=pool, precond_state=precond, checkpoint_interval=64, **same)

    def test_types_of_outputs_and_gradients_are_those_of_the_inputs(self):
        named = random_inputs("gated_deltanet")
        expected = recurrence("gated_deltanet", named)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
            typed = {name: x.to(torch.float32 if name == "g" else dtype).requires_grad_() for name, x in named.items()}
            out = fwt.forward("gated_deltanet", **typed, initial_state=torch.zeros(2, 4, 12, 20, dtype=dtype), output_final_state=True)
            self.assertEqual((out.o.dtype, out.final_state.dtype), (dtype, torch.float32))
            self.assertNear(out.o, expected[0], tolerance, dtype)
            out.o.sum().backward()
            for name, x in typed.items():
                self.assertEqual(x.grad.dtype, x.dtype, name)

    def test_strided_views_and_gradients_without_strides(self):
        fused = torch.randn(2, 20, 3 * 2 * 8, dtype=torch.float64, requires_grad=True)
        q, k, v = (x.view(2, 20, 2, 8) for x in fused.chunk(3, -1))
        last = torch.randn(2, 20, 8, 2, dtype=torch.float64).transpose(2, 3)  # last stride is not 1
        beta = torch.rand(2, 1, 2, dtype=torch.float64).expand(2, 20, 2)
        found = fwt.forward("deltanet", q, last, v, beta=beta).o
        self.assertNear(found, recurrence("deltanet", {"q": q, "k": last, "v": v, "beta": beta})[0], 1e-12, "values")
        (a,) = torch.autograd.grad(fwt.forward("deltanet", q, k, v, beta=beta).o.sum(), fused)
        (b,) = torch.autograd.grad(recurrence("deltanet", {"q": q, "k": k, "v": v, "beta": beta})[0].sum(), fused)
        self.assertNear(a, b, 1e-12, "gradients")

    def test_recomputation_gives_the_same_bits_and_keeps_nothing(self):
        named = {name: x.float().requires_grad_() for name, x in random_inputs("kda", T=100).items()}
        found = []
        for save in (True, False):
            out = fwt.forward("kda", **named, save=save).o
            kept = [t for t in out.grad_fn.saved_tensors if t is not None and t.dtype == torch.uint8] if hasattr(out.grad_fn, "saved_tensors") else []
            self.assertEqual(len(kept), int(save))
            found.append(torch.autograd.grad(out.square().sum(), list(named.values())))
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(*found)))

    def test_backward_of_a_program_of_its_own(self):
        named = {name: x.requires_grad_() for name, x in random_inputs("qdelta").items()}
        out = fwt.forward("qdelta", **named).o
        d = torch.randn_like(out)
        expected = torch.autograd.grad(out, list(named.values()), d)
        found = fwt.backward("qdelta", named, d)
        self.assertEqual(list(found), list(named))
        for name, b in zip(named, expected):
            self.assertTrue(torch.equal(found[name], b), name)
        self.assertEqual(list(fwt.backward("qdelta", named, d, wanted=["lambda_"])), ["lambda_"])

    def test_steps_equal_forward_and_update_the_state_in_place(self):
        for rule in ("gated_deltanet", "precond_kda"):
            for v_first in (False, True):
                named = random_inputs(rule, T=9, dtype=torch.float32)
                center = named.get("precond_center")
                whole = fwt.forward(rule, **named, output_final_state=True, state_v_first=v_first)
                state = torch.zeros_like(whole.final_state)
                precond = None if whole.final_precond is None else torch.zeros_like(whole.final_precond)
                version = state._version
                for t in range(9):
                    token = {name: x[:, t : t + 1] for name, x in named.items() if x is not center}
                    o = fwt.step(rule, state=state, precond_state=precond, state_v_first=v_first, **token, **({} if center is None else {"precond_center": center}))
                    self.assertNear(o, whole.o[:, t : t + 1], 1e-4, rule)
                self.assertNear(state, whole.final_state, 1e-4, rule)
                self.assertGreater(state._version, version)

    def test_second_derivatives_are_refused(self):
        named = {name: x.requires_grad_() for name, x in random_inputs("deltanet").items()}
        out = fwt.forward("deltanet", **named).o.square().sum()
        (first,) = torch.autograd.grad(out, named["q"], create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "fastweight: second derivatives"):
            torch.autograd.grad(first.sum(), named["k"])

    def test_forward_mode_and_transforms_are_refused(self):
        named = {name: x.float() for name, x in random_inputs("deltanet").items()}
        of_v = lambda v: fwt.forward("deltanet", **{**named, "v": v}).o  # noqa: E731
        v = named["v"]
        of_v(v)  # known already
        for refused in (lambda: torch.func.jvp(of_v, (v,), (v,)), lambda: torch.func.jacfwd(of_v)(v)):
            with self.assertRaisesRegex(RuntimeError, "fastweight: derivatives in forward mode"):
                refused()
        with torch.autograd.forward_ad.dual_level():
            self.assertEqual(of_v(v).shape, v.shape)  # nothing has a tangent
            with self.assertRaisesRegex(RuntimeError, "fastweight: derivatives in forward mode"):
                of_v(torch.autograd.forward_ad.make_dual(v, v))
        with self.assertRaisesRegex(RuntimeError, "fastweight: torch.func.grad"):
            torch.func.grad(lambda v: of_v(v).sum())(v)

    def test_autocast_and_checkpointing(self):
        named = {name: x.float().requires_grad_() for name, x in random_inputs("gated_deltanet").items()}
        projection = torch.nn.Linear(12, 12)

        def call():
            return fwt.forward("gated_deltanet", **{**named, "q": projection(named["q"]), "k": projection(named["k"])}).o

        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call()
            self.assertEqual(out.dtype, torch.bfloat16)
            out.sum().backward()
        self.assertEqual(projection.weight.grad.dtype, torch.float32)
        leaves = [*named.values(), projection.weight]
        plain = torch.autograd.grad(call().sum(), leaves)
        again = torch.autograd.grad(torch.utils.checkpoint.checkpoint(call, use_reentrant=False).sum(), leaves)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain, again)))

    def test_the_same_bits_with_any_number_of_threads_and_in_every_run(self):
        named = {name: x.float().requires_grad_() for name, x in random_inputs("gated_deltanet", T=200).items()}
        runs = []
        try:
            for threads in (1, 2, 3, 2):
                fastweight.set_threads(threads)
                out = fwt.forward("gated_deltanet", **named).o
                runs.append((out, *torch.autograd.grad(out.square().sum(), list(named.values()))))
        finally:
            fastweight.set_threads(0)
        self.assertTrue(all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run)))

    def test_threads_of_python_call_at_once(self):
        from concurrent.futures import ThreadPoolExecutor

        def run(seed):
            named = {name: x.float().requires_grad_() for name, x in random_inputs("kda", seed=seed).items()}
            out = fwt.forward("kda", **named).o
            return (out.detach(), *torch.autograd.grad(out.square().sum(), list(named.values())))

        seeds = list(range(1, 5)) * 4
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(run, seeds))
        alone = {seed: run(seed) for seed in set(seeds)}
        for seed, found in zip(seeds, together):
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(found, alone[seed])), seed)

    def test_a_call_that_went_well_does_not_let_a_wrong_one_pass(self):
        named = {name: x.float() for name, x in random_inputs("gated_deltanet").items()}
        fwt.forward("gated_deltanet", **named)
        for change in ({"g": named["g"][:, :, :3]}, {"g": named["g"].double(), "bf16_operands": True}, {"cu_seqlens": torch.tensor([0, 37])}, {"beta": None}):
            with self.assertRaises(fastweight.Error):
                fwt.forward("gated_deltanet", **{**named, **change})


    def test_gates_given_as_logits_equal_gates_formed_by_torch_in_values_and_gradients(self):
        def decay(how, x, a_log, bias):
            rate = 1 if a_log is None else a_log.exp().reshape(-1, *[1] * (x.dim() - 3))
            return {"softplus": -rate * F.softplus(x + bias), "lower_bound": -5 * torch.sigmoid(rate * (x + bias)), "logsigmoid": F.logsigmoid(x + bias) / 16}[how]

        for rule, wide in (("gated_deltanet", (4,)), ("kda", (4, 12))):
            for how in ("softplus", "lower_bound", "logsigmoid"):
                named = random_inputs(rule, T=21)
                named["g"], named["beta"] = named["g"] * 20 + 1, named["beta"] * 8 - 4
                generator = torch.Generator().manual_seed(3)
                parameters = [torch.randn(wide[:1], generator=generator, dtype=torch.float64), torch.randn(wide, generator=generator, dtype=torch.float64)]
                if how == "logsigmoid":
                    parameters[0] = None
                leaves = [x.requires_grad_() for x in (*named.values(), *parameters) if x is not None]
                gates = f"g={how} beta=sigmoid"
                found = fwt.forward(rule, **named, a_log=parameters[0], dt_bias=parameters[1], gates=gates).o
                formed = {**named, "g": decay(how, named["g"], *parameters), "beta": named["beta"].sigmoid()}
                expected = fwt.forward(rule, **formed).o
                with self.subTest(rule=rule, how=how):
                    self.assertNear(found, expected, 1e-11, "o")
                    weights = weights_like([found])
                    for a, b in zip(gradients([found], leaves, weights), gradients([expected], leaves, weights)):
                        self.assertNear(a, b, 1e-9, "gradient")
                    token = {name: x.detach()[:, :1] for name, x in named.items()}
                    state = torch.zeros(2, 4, 12, 20, dtype=torch.float64)
                    plain = [x if x is None else x.detach() for x in parameters]
                    o = fwt.step(rule, state=state, a_log=plain[0], dt_bias=plain[1], gates=gates, **token)
                    self.assertNear(o, expected[:, :1], 1e-11, "step")

    def test_only_so_many_prepared_calls_are_kept_and_those_that_went_are_made_again(self):
        named = {name: x.float() for name, x in random_inputs("gated_deltanet", T=12).items()}
        expected = [fwt.forward("gated_deltanet", **{name: x[:, :t] for name, x in named.items()}).o for t in range(1, 12)]
        with mock.patch.object(_plans, "_MOST_CALLS", 4):
            _plans.kept().clear()
            for _ in range(2):
                for t in range(1, 12):
                    o = fwt.forward("gated_deltanet", **{name: x[:, :t] for name, x in named.items()}).o
                    self.assertTrue(torch.equal(o, expected[t - 1]), t)
                    self.assertLessEqual(len(_plans.kept()), 4)

    def test_a_call_is_known_again_by_everything_that_its_tensors_are(self):
        def run(named, **options):
            out = fwt.forward("gated_deltanet", **named, **options)
            leaves = [x for x in named.values() if x.requires_grad]
            return (out.o, out.final_state, *(torch.autograd.grad(out.o.sum(), leaves) if leaves else ()))

        plain = {name: x.float() for name, x in random_inputs("gated_deltanet", T=40).items()}
        like_v = {**plain, "v": plain["k"].repeat_interleave(2, 2)}
        apart = torch.stack([plain["q"], plain["k"]], -2)  # strides that are not those of plain
        variants = [
            plain, {name: x.clone().requires_grad_() for name, x in plain.items()}, {**plain, "v": torch.nn.Parameter(plain["v"])}, {**plain, "q": apart[..., 0, :]},
            {name: x[:, :39] for name, x in plain.items()}, {name: x[:1] for name, x in plain.items()}, {**plain, "g": plain["g"].bfloat16()},
            {**plain, "q": like_v["q"], "k": like_v["q"]}, {name: x[:, :7] for name, x in plain.items()},
        ]
        expected = []
        for named in variants:
            _plans.kept().clear()
            _plans._kept.seen = {}
            expected.append(run(named, output_final_state=True))
        for guards, allocator in ((_plans._Guards, _calls._empty_cpu), (None, None)):
            with mock.patch.object(_plans, "_Guards", guards), mock.patch.object(_calls, "_empty_cpu", allocator):
                _plans.kept().clear()
                _plans._kept.seen = {}
                for _ in range(3):
                    for named, wanted in zip(variants, expected):
                        found = run(named, output_final_state=True)
                        self.assertTrue(len(found) == len(wanted) and all(a is b is None or torch.equal(a, b) for a, b in zip(found, wanted)))
                        with torch.inference_mode():
                            self.assertTrue(torch.equal(fwt.forward("gated_deltanet", **named).o, wanted[0]))
                self.assertLessEqual(max([0, *map(len, _plans._kept.seen.values())]), _plans._MOST_GUARDS)

    def test_a_call_without_gradients_does_not_stand_for_one_with(self):
        named = {name: x.float().requires_grad_() for name, x in random_inputs("gated_deltanet", T=5).items()}
        for _ in range(2):
            with torch.no_grad():
                self.assertFalse(fwt.forward("gated_deltanet", **named, save=False).o.requires_grad)
            self.assertTrue(fwt.forward("gated_deltanet", **named, save=False).o.requires_grad)
            detached = {name: x.detach() for name, x in named.items()}
            self.assertFalse(fwt.forward("gated_deltanet", **detached).o.requires_grad)
            some = fwt.forward("gated_deltanet", **{**detached, "v": named["v"]}).o
            self.assertEqual(torch.autograd.grad(some.sum(), named["v"])[0].shape, named["v"].shape)

    def test_some_gradients_of_tensors_that_are_not_contiguous(self):
        mixed = torch.randn(2, 9, 3, 4, 12).requires_grad_()
        q, k, v = mixed.unbind(2)
        beta = torch.rand(2, 9, 4)
        d = torch.randn(2, 9, 4, 12)
        (found,) = torch.autograd.grad(fwt.forward("deltanet", q, k, v, beta=beta).o, mixed, d)
        (expected,) = torch.autograd.grad(fwt.forward("deltanet", *[t.contiguous() for t in (q, k, v)], beta=beta).o, mixed, d)
        self.assertTrue(torch.equal(found, expected))
        (wide,) = torch.autograd.grad(fwt.forward("deltanet", q, k, v, beta=beta).o.sum(), mixed)  # a cotangent of strides 0
        (plain,) = torch.autograd.grad(fwt.forward("deltanet", q, k, v, beta=beta).o, mixed, torch.ones_like(d))
        self.assertTrue(torch.equal(wide, plain))


class Refusals(unittest.TestCase):
    def setUp(self):
        self.named = {name: x.float() for name, x in random_inputs("gated_deltanet").items()}

    def refused(self, pattern, rule="gated_deltanet", **changes):
        with self.assertRaisesRegex(fastweight.Error, pattern):
            fwt.forward(rule, **{**self.named, **changes})

    def test_a_message_names_the_argument_what_was_expected_and_what_came(self):
        named = self.named
        self.refused("beta: expected a tensor, since the rule .* uses it, got none", beta=None)
        self.refused("write_gate: expected none, since the rule .* does not use it", write_gate=named["v"])
        self.refused(r"g: shape: expected \[2, 37, 4\], got \[2, 36, 4\]", g=named["g"][:, 1:])
        self.refused("g: expected a tensor on cpu, as q is, got one on meta", g=named["g"].to("meta"))
        self.refused("v: expected a floating-point tensor of 16, 32 or 64 bits, got torch.int64", v=named["v"].long())
        self.refused("v: expected a floating-point tensor of 16, 32 or 64 bits, got torch.float8", v=named["v"].to(torch.float8_e4m3fn))
        self.refused("k: expected 4 dimensions .* got shape", k=named["k"][0])
        self.refused("q: expected a torch.Tensor, got list", q=[1.0])
        self.refused("beta: expected a torch.Tensor, got float", beta=0.5)
        self.refused("HV: expected", v=named["v"][:, :, :3], g=named["g"][:, :, :3], beta=named["beta"][:, :, :3])
        self.refused("unknown preset 'gated_deltanett'; did you mean", rule="gated_deltanett")
        self.refused("axis decay: expected one of none, constant, scalar, channel", rule="decay=fast")
        self.refused("initial_state: shape: expected", initial_state=torch.zeros(2, 4, 12, 21))
        self.refused("form: expected one of auto, token, chunk, decode", form="fast")
        self.refused("cu_seqlens: expected a tensor of int32 or int64", cu_seqlens=[0, 37])
        self.refused("q: expected batch size 1 with cu_seqlens", cu_seqlens=torch.tensor([0, 37]))
        one = {name: x[:1] for name, x in named.items()}
        self.refused(r"cu_seqlens\[1\]: expected T = 37, got 36", **one, cu_seqlens=torch.tensor([0, 36]))
        self.refused("gates: g: expected one of value, sigmoid, softplus, .* got 'fast'", gates="g=fast")
        self.refused("gates: expected name=value with a name of g, beta, .* got 'decay=softplus'", gates="decay=softplus")
        self.refused("a_log: expected none, since the log-decay is given as its value", a_log=torch.zeros(4))
        self.refused("bf16|FW_F32", q=named["q"].double(), bf16_operands=True)

    def test_unknown_arguments(self):
        for call in (fwt.forward, fwt.plan_text):
            with self.assertRaisesRegex(TypeError, f"{call.__name__}: unexpected betta .nearest: beta"):
                call("gated_deltanet", **self.named, betta=self.named["beta"])
        with self.assertRaisesRegex(TypeError, "unexpected output_final_sate .nearest: output_final_state"):
            fwt.forward("gated_deltanet", **self.named, output_final_sate=True)
        token = {name: x[:1] for name, x in self.named.items()}
        with self.assertRaisesRegex(fastweight.Error, "slots: expected a torch.Tensor of int32, got list"):
            fwt.prefill("gated_deltanet", state=torch.zeros(2, 4, 12, 20), slots=[1], **token)

    def test_a_library_that_is_none_of_this_version(self):
        for path, pattern in ((ctypes.util.find_library("m"), "expected libfastweight of this package's version, which has"), (__file__, "expected a library that loads")):
            with mock.patch.object(_library, "find_library", lambda path=path: path), self.assertRaisesRegex(ImportError, pattern):
                _library.library.__wrapped__()

    def test_the_version_is_an_attribute_too(self):
        self.assertEqual(fastweight.__version__, fastweight.version())
        self.assertTrue(issubclass(fwt.NotServed, NotImplementedError))

    def test_states_of_a_step(self):
        token = {name: x[:, :1] for name, x in self.named.items()}
        for state, pattern in ((None, "state: expected a torch.Tensor, got NoneType"), (torch.zeros(2, 4, 12, 20).double(), "state: expected torch.float32")):
            with self.assertRaisesRegex(fastweight.Error, pattern):
                fwt.step("gated_deltanet", state=state, **token)
        token["q"] = token["q"].requires_grad_()
        with self.assertRaisesRegex(fastweight.Error, "step: expected tensors without gradients"):
            fwt.step("gated_deltanet", state=torch.zeros(2, 4, 12, 20), **token)

    @unittest.skipIf(torch.cuda.is_available(), "there is a GPU")
    def test_no_gpu(self):
        with self.assertRaises(fastweight.DeviceError):
            fastweight.check("cuda")


class Header(unittest.TestCase):
    def test_forward_takes_every_input_of_the_header(self):
        self.assertEqual([name for name in _calls.INPUTS if name in fwt._NAMED], list(fwt._NAMED))  # in the header's order
        with self.assertRaisesRegex(TypeError, "unexpected gama .tensors are q, k"):
            fwt.forward("gated_deltanet", **random_inputs("gated_deltanet", T=1), gama=torch.zeros(4))

    def test_an_input_that_forward_does_not_name_comes_by_its_name(self):
        named = random_inputs("gated_deltanet", T=5)
        expected = fwt.forward("gated_deltanet", **named).o
        header = _calls.INPUTS[:4] + ("new_input",) + _calls.INPUTS[4:]
        with unittest.mock.patch.object(_calls, "INPUTS", header):
            ordered = fwt._in_order(tuple(named.get(name) for name in fwt._NAMED), {"new_input": 7})
        self.assertEqual(ordered[4], 7)
        self.assertIs(ordered[5], named["beta"])
        self.assertTrue(torch.equal(fwt.forward("gated_deltanet", **{k: named[k] for k in "qkvg"}, beta=ordered[5]).o, expected))

    def test_every_input_that_a_rule_takes_is_known_to_the_loop(self):
        for rule in ALL:
            q = torch.zeros(1, 1, 1, 2)
            taken = set(random_inputs(rule, T=1))
            for name in taken:
                given = {key: x for key, x in random_inputs(rule, T=1).items() if key != name}
                with self.subTest(rule=rule, without=name), self.assertRaisesRegex(fastweight.Error, name.rstrip("_")):
                    fwt.forward(rule, **{**dict.fromkeys("qkv"), **given})


if __name__ == "__main__":
    unittest.main()
