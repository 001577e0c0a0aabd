"""fastweight.torch on a GPU: values and gradients against the torch loop in float64, streams, captured graphs, offsets on the device, devices by number.
Skipped where there is none."""

import threading
import unittest

import torch

import fastweight
import fastweight.torch as fwt
from fastweight.torch import _plans, nn
from reference import random_inputs, recurrence

if not torch.cuda.is_available():
    raise unittest.SkipTest("no GPU")

RULES = ("linear_attention", "mamba2", "gla", "deltanet", "gated_deltanet", "kda", "gated_deltanet2", "comba", "precond_gated_deltanet", "precond_kda", "efla")


def relative(found, expected):
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp_min(1e-12))


def inputs(rule, T, K, V, dtype, B=1, H=2, HV=2, **kwargs):
    """Leaves on the GPU, and the same numbers in float64 on the CPU."""
    exact = random_inputs(rule, B, T, H, HV, K, V, dtype=dtype, **kwargs)
    if dtype is torch.bfloat16 and "g" in exact and exact["g"].dim() == 3:
        exact["g"] = exact["g"].float()
    return {n: x.cuda().requires_grad_() for n, x in exact.items()}, {n: x.double().requires_grad_() for n, x in exact.items()}


def run(rule, named, **options):
    """o and the gradients of sum(o w), w of a fixed seed."""
    out = fwt.forward(rule, **{"k": None, **named}, **options)
    w = torch.randn(out.o.shape, generator=torch.Generator().manual_seed(3)).to(out.o)
    return (out.o, *torch.autograd.grad(out.o, list(named.values()), w))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


class Layers(unittest.TestCase):
    """fastweight.torch.nn on the device against the CPU in float64."""

    def test_short_conv(self):
        torch.manual_seed(0)
        x, weight, bias, before = torch.randn(1, 90, 24), torch.randn(24, 4), torch.randn(24), torch.randn(3, 3, 24)
        offsets = torch.tensor([0, 2, 2, 90])
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
            for where, longest in ((offsets, None), (offsets.cuda(), 90)):
                with self.subTest(dtype=dtype, longest=longest):
                    leaves = [t.to(dtype).cuda().requires_grad_() for t in (x, weight, bias)]
                    exact = [t.detach().double().cpu().requires_grad_() for t in leaves]
                    y, state = nn.short_conv(*leaves, before.to(dtype).cuda(), output_final_state=True, cu_seqlens=where, max_seqlen=longest)
                    want, want_state = nn.short_conv(*exact, before.to(dtype).double(), output_final_state=True, cu_seqlens=offsets)
                    self.assertLess(relative(y, want), bound)
                    self.assertLess(relative(state, want_state), 1e-7)
                    w = torch.randn_like(want)
                    for got, expected in zip(torch.autograd.grad(y, leaves, w.to(y)), torch.autograd.grad(want, exact, w)):
                        self.assertLess(relative(got, expected), bound)

    def test_steps_and_forward(self):
        torch.manual_seed(0)
        for layer in (nn.GatedDeltaNet(128, 2), nn.KimiDeltaAttention(128, 2), nn.GatedDeltaNet2(128, 2)):
            with self.subTest(layer=type(layer).__name__):
                x = torch.randn(2, 40, 128)
                want = layer.double()(x.double())
                layer = layer.float().cuda()
                with torch.no_grad():
                    with torch.autocast("cuda", dtype=torch.bfloat16):
                        self.assertLess(relative(layer(x.cuda()), want), 2e-2)
                    state = layer.new_state(2)
                    stepped = torch.stack([layer.step(x[:, t].cuda(), state) for t in range(40)], 1)
                self.assertLess(relative(stepped, want), 1e-4)


class Values(unittest.TestCase):
    def near(self, rule, dtype, tolerance, T, K):
        named, exact = inputs(rule, T, K, K, dtype)
        found = run(rule, named)
        o = recurrence(rule, exact)[0]
        w = torch.randn(o.shape, generator=torch.Generator().manual_seed(3)).to(dtype).double()
        expected = (o, *torch.autograd.grad((o * w).sum(), list(exact.values())))
        for name, a, b in zip(("o", *named), found, expected):
            with self.subTest(rule=rule, dtype=dtype, of=name):
                self.assertLessEqual(relative(a, b), tolerance)
        return found

    def test_bfloat16(self):
        for rule in RULES:
            self.near(rule, torch.bfloat16, 1e-2, 150, 64)

    def test_keys_above_128(self):
        for rule in ("linear_attention", "mamba2", "deltanet", "gated_deltanet", "kaczmarz", "comba", "kda", "gated_deltanet2"):
            for K in (192, 256):
                self.near(rule, torch.bfloat16, 1e-2, 150, K)

    def test_float32_runs_exactly(self):
        for rule in RULES:
            self.near(rule, torch.float32, 5e-6, 70, 32)

    def test_steps_in_a_pool(self):
        named, _ = inputs("kda", 9, 64, 64, torch.float32)
        named = {n: x.detach() for n, x in named.items()}
        whole = fwt.forward("kda", **named, output_final_state=True)
        pool = torch.zeros(4, 2, 64, 64, device="cuda")
        slots = torch.tensor([2], dtype=torch.int32, device="cuda")
        for t in range(9):
            o = fwt.step("kda", state=pool, slots=slots, **{n: x[:, t : t + 1] for n, x in named.items()})
            self.assertLess(relative(o, whole.o[:, t : t + 1]), 1e-5)
        self.assertLess(relative(pool[2], whole.final_state[0]), 1e-5)
        self.assertEqual(float(pool[[0, 1, 3]].abs().max()), 0)


class Execution(unittest.TestCase):
    def setUp(self):
        self.named, _ = inputs("gated_deltanet", 200, 64, 64, torch.bfloat16)
        self.expected = run("gated_deltanet", self.named)

    def test_a_second_run_has_the_same_bits(self):
        self.assertTrue(same(run("gated_deltanet", self.named), self.expected))

    def test_recomputation_has_the_same_bits(self):
        self.assertTrue(same(run("gated_deltanet", self.named, save=False), self.expected))

    def test_a_stream_of_the_callers(self):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = run("gated_deltanet", self.named)
        stream.synchronize()
        self.assertTrue(same(found, self.expected))

    def test_a_thread_of_the_callers(self):
        found = []
        thread = threading.Thread(target=lambda: found.extend(run("gated_deltanet", self.named)))
        thread.start()
        thread.join()
        self.assertTrue(same(found, self.expected))

    def test_a_captured_graph_is_replayed_with_other_numbers(self):
        static = {n: x.detach().clone().requires_grad_() for n, x in self.named.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run("gated_deltanet", static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        w = torch.randn(self.expected[0].shape, generator=torch.Generator().manual_seed(3)).to(self.expected[0])
        with torch.cuda.graph(graph):
            o = fwt.forward("gated_deltanet", **static).o
            found = (o, *torch.autograd.grad(o, list(static.values()), w))
        with torch.no_grad():
            for x in static.values():
                x.mul_(0.5)
        graph.replay()
        self.assertFalse(torch.equal(found[0], self.expected[0]))
        with torch.no_grad():
            for n, x in static.items():
                x.copy_(self.named[n])
        graph.replay()
        self.assertTrue(same(found, self.expected))

    def test_compiled(self):
        compiled = torch.compile(lambda **x: fwt.forward("gated_deltanet", **x).o.sin(), backend="aot_eager", fullgraph=True)
        o = compiled(**self.named)
        self.assertTrue(torch.equal(o, self.expected[0].sin()))
        found = torch.autograd.grad(o.sum(), list(self.named.values()))
        expected = torch.autograd.grad(fwt.forward("gated_deltanet", **self.named).o.sin().sum(), list(self.named.values()))
        self.assertTrue(same(found, expected))


class Packed(unittest.TestCase):
    LENGTHS = [70, 0, 129, 1]

    def offsets(self, lengths, dtype=torch.int32):
        return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=dtype, device="cuda")

    def test_sequences_equal_each_alone(self):
        for rule in ("gated_deltanet", "kda"):
            named, _ = inputs(rule, sum(self.LENGTHS), 64, 64, torch.bfloat16)
            named = {n: x.detach() for n, x in named.items()}
            for dtype in (torch.int32, torch.int64):
                offsets = self.offsets(self.LENGTHS, dtype)
                packed = fwt.forward(rule, **named, output_final_state=True, cu_seqlens=offsets)
                bounded = fwt.forward(rule, **named, output_final_state=True, cu_seqlens=offsets, max_seqlen=150)
                for i, length in enumerate(self.LENGTHS):
                    begin = sum(self.LENGTHS[:i])
                    if not length:
                        self.assertEqual(float(packed.final_state[i].abs().max()), 0)
                        continue
                    alone = fwt.forward(rule, **{n: x[:, begin : begin + length] for n, x in named.items()}, output_final_state=True)
                    for out in (packed, bounded):
                        self.assertTrue(torch.equal(out.o[:, begin : begin + length], alone.o) and torch.equal(out.final_state[i], alone.final_state[0]))

    def test_a_graph_reads_offsets_where_they_are(self):
        named, _ = inputs("kda", 200, 64, 64, torch.bfloat16)
        named = {n: x.detach() for n, x in named.items()}
        offsets = self.offsets(self.LENGTHS)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fwt.forward("kda", **named, cu_seqlens=offsets, max_seqlen=180)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = fwt.forward("kda", **named, cu_seqlens=offsets, max_seqlen=180).o
        for lengths in (self.LENGTHS, [20, 5, 175, 0]):
            offsets.copy_(self.offsets(lengths))
            graph.replay()
            self.assertTrue(torch.equal(o, fwt.forward("kda", **named, cu_seqlens=self.offsets(lengths)).o))

    def test_a_capture_refuses_offsets_that_it_would_have_to_wait_for(self):
        named, _ = inputs("kda", 200, 64, 64, torch.bfloat16)
        graph, fresh = torch.cuda.CUDAGraph(), self.offsets(self.LENGTHS)
        with torch.cuda.graph(graph):
            with self.assertRaisesRegex(fastweight.Error, "cu_seqlens: expected offsets whose values are known while a CUDA graph is captured"):
                fwt.forward("kda", **{n: x.detach() for n, x in named.items()}, cu_seqlens=fresh)
            torch.zeros(1, device="cuda")


class Devices(unittest.TestCase):
    def test_the_descriptor_says_the_tensors_device(self):
        config, shapes = _plans.Config("kda", bf16_operands=True), _plans.Shapes(1, 64, 1, 1, 64, 64)
        count = torch.cuda.device_count()
        for number in range(count):
            self.assertEqual(_plans.descriptor(config, shapes, torch.bfloat16, torch.bfloat16, torch.device("cuda", number), None).device_number, number)
        desc = _plans.descriptor(config, shapes, torch.bfloat16, torch.bfloat16, torch.device("cuda", count), None)
        with self.assertRaisesRegex(fwt.DeviceError, "device_number: expected"):
            _plans.sizes_of(desc)
        self.assertEqual(torch.cuda.current_device(), 0)

    @unittest.skipIf(torch.cuda.device_count() < 2, "one GPU")
    def test_tensors_of_another_device_than_the_current_one(self):
        named, _ = inputs("kda", 100, 64, 64, torch.bfloat16)
        there = {n: x.detach().to("cuda:1").requires_grad_() for n, x in named.items()}
        found, expected = run("kda", there), run("kda", named)
        self.assertEqual(torch.cuda.current_device(), 0)
        self.assertTrue(all(a.device.index == 1 and torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected)))

    def test_arguments_on_two_devices(self):
        named, _ = inputs("deltanet", 5, 64, 64, torch.bfloat16)
        with self.assertRaisesRegex(fastweight.Error, "beta: expected a tensor on cuda:0, as q is, got one on cpu"):
            fwt.forward("deltanet", **{**named, "beta": named["beta"].cpu()})


if __name__ == "__main__":
    unittest.main()
