"""The operators: torch.compile without a break, fake kernels, opcheck, export."""

import unittest

import torch

import fastweight.torch as fwt
from fastweight.torch import _calls
from reference import random_inputs


def operator_arguments(rule, named, final, save, cu_seqlens=None):
    config = _calls.Config(rule)
    inputs = [named.get("lambda_" if name == "lambda" else name) for name in _calls.INPUTS]
    return (*inputs, cu_seqlens, *config, final, save)


class Operators(unittest.TestCase):
    def test_opcheck(self):
        for rule in ("gated_deltanet", "precond_gated_deltanet", "gated_deltanet2"):
            named = {name: x.float().requires_grad_() for name, x in random_inputs(rule, T=5).items()}
            torch.library.opcheck(torch.ops.fastweight.forward.default, operator_arguments(rule, named, True, False))
            # What is kept for backward has bytes that nobody writes, so two runs of it are not compared.
            checks = ("test_schema", "test_autograd_registration", "test_faketensor")
            torch.library.opcheck(torch.ops.fastweight.forward.default, operator_arguments(rule, named, False, True), test_utils=checks)
        named = {name: x.float().requires_grad_() for name, x in random_inputs("kda", B=1, T=6).items()}
        torch.library.opcheck(torch.ops.fastweight.forward.default, operator_arguments("kda", named, True, False, torch.tensor([0, 2, 6])))
        named = {name: x.detach() for name, x in named.items()}
        step = operator_arguments("kda", named, None, None)[:-2]
        torch.library.opcheck(torch.ops.fastweight.step_.default, (*step, torch.zeros(1, 4, 12, 20), None, None))
        cotangent = torch.ones(1, 6, 4, 20)
        wanted = [name in named for name in _calls.INPUTS]
        torch.library.opcheck(torch.ops.fastweight.backward.default, (*step, cotangent, None, None, None, wanted))

    def test_fullgraph_equals_eager(self):
        for rule, packed in (("gated_deltanet", False), ("precond_kda", False), ("kda", True)):
            named = {name: x.float().requires_grad_() for name, x in random_inputs(rule, B=1, T=30).items()}
            cu_seqlens = torch.tensor([0, 11, 30]) if packed else None

            def call(*tensors):
                out = fwt.forward(rule, **dict(zip(named, tensors)), output_final_state=True, cu_seqlens=cu_seqlens)
                return out.o.sin().sum() + out.final_state.square().sum()

            expected = torch.autograd.grad(call(*named.values()), list(named.values()))
            for dynamic in (False, True):
                torch._dynamo.reset()
                compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
                with self.subTest(rule=rule, dynamic=dynamic):
                    for a, b in zip(torch.autograd.grad(compiled(*named.values()), list(named.values())), expected):
                        self.assertTrue(torch.equal(a, b))

    def test_lengths_that_change_do_not_compile_again_and_again(self):
        torch._dynamo.reset()
        count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(lambda **x: fwt.forward("deltanet", **x).o, backend=count, fullgraph=True, dynamic=True)
        for length in (16, 40, 100):
            named = {name: x.float() for name, x in random_inputs("deltanet", T=length).items()}
            self.assertTrue(torch.equal(compiled(**named), fwt.forward("deltanet", **named).o))
        self.assertEqual(count.frame_count, 1)

    def test_a_step_mutates_inside_a_graph(self):
        torch._dynamo.reset()
        named = {name: x.float() for name, x in random_inputs("gated_deltanet", T=1).items()}
        states = [torch.zeros(2, 4, 12, 20) for _ in range(2)]
        compiled = torch.compile(lambda state, named: fwt.step("gated_deltanet", state=state, **named) + 0, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            a = compiled(states[0], named)
            b = fwt.step("gated_deltanet", state=states[1], **named)
        self.assertTrue(torch.equal(a, b) and torch.equal(*states))

    def test_a_bound_on_what_is_kept_holds(self):
        for rule in ("gated_deltanet", "kda", "linear_attention", "precond_kda"):
            for B, T in ((1, 1), (3, 63), (2, 65), (1, 1000)):
                named = {name: x.float() for name, x in random_inputs(rule, B=B, T=T).items()}
                inputs = operator_arguments(rule, named, False, True)[: len(_calls.INPUTS)]
                exact = _calls.forward(_calls.Config(rule), inputs, None, False, -1)[3].numel()
                self.assertLessEqual(exact, _calls.saved_bound(_calls.Config(rule), inputs, B, False), (rule, B, T))

    def test_a_program_is_exported(self):
        class Module(torch.nn.Module):
            def forward(self, q, k, v, beta):
                return fwt.forward("deltanet", q, k, v, beta=beta).o

        named = {name: x.float() for name, x in random_inputs("deltanet").items()}
        program = torch.export.export(Module(), tuple(named.values()), strict=False)
        self.assertTrue(torch.equal(program.module()(*named.values()), fwt.forward("deltanet", **named).o))


if __name__ == "__main__":
    unittest.main()
