"""python -m fastweight.bench --host: what a call costs beside computing, in microseconds, on tensors so small that computing is next to nothing.

The rows are parts of each other: the library's own work (called with everything prepared), the prepared call (outputs made, addresses written), the function
that a user calls, and that under autograd beside a torch.autograd.Function that computes nothing, which no package can be faster than, alone and as one of eight
calls of a graph. Of every row the least and the median of rounds, of the thread's CPU time: on a machine that others use too, the clock says more of them than
of us."""

import statistics
import time

IN_GRAPH = 8  # calls


def _per_call(run, calls, rounds, clock):
    for _ in range(20):
        run()
    found = []
    for _ in range(rounds):
        begin = clock()
        for _ in range(calls):
            run()
        found.append((clock() - begin) / calls * 1e6)
    return min(found), statistics.median(found)


def measure(device="cpu", tokens=1, heads=1, dim=8, calls=200, rounds=20):
    """{row: (least, median)} in microseconds."""
    import torch

    import fastweight
    from fastweight import _library
    from fastweight.torch import _calls, forward, ops, step

    clock = time.thread_time if device == "cpu" else time.perf_counter
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(1, tokens, heads, dim, device=device, dtype=dtype) for _ in range(3))
    g, beta = -torch.rand(1, tokens, heads, device=device), torch.rand(1, tokens, heads, device=device)
    leaves = [q, k, v, g, beta]
    cotangent = torch.ones_like(v)
    rows = {}

    def row(name, run, of_run=1):
        rows[name] = tuple(x / of_run for x in _per_call(run, max(1, calls // of_run), rounds, clock))
        if device == "cuda":
            torch.cuda.synchronize()

    def call():
        return forward("gated_deltanet", q, k, v, g=g, beta=beta).o

    fastweight.set_threads(1)
    try:
        nothing = _library.library()["fw_get_threads"]
        row("a foreign call of nothing", lambda: nothing())
        with torch.no_grad():
            call()
            prepared = [c for c in _calls.kept().values() if isinstance(c, _calls.Forward)][-1]
            o = torch.empty_like(v)
            prepared._tensors.point((*leaves, o))
            row("the library's forward", lambda: prepared._run(leaves))
            row("prepared forward", lambda: prepared(leaves))
            row("forward, no grad", call)
            row("ops.chunk_gated_delta_rule, no grad", lambda: ops.chunk_gated_delta_rule(q, k, v, g=g, beta=beta))
            state = torch.zeros(1, heads, dim, dim, device=device)
            row("step", lambda: step("gated_deltanet", q, k, v, state, g=g, beta=beta))
        for tensor in leaves:
            tensor.requires_grad_()
        torch.autograd.grad(call(), leaves, cotangent)
        with torch.no_grad():
            ahead = [c for c in _calls.kept().values() if isinstance(c, _calls.Forward)][-1]
            saved = ahead(leaves)[3]
            # Autograd's own has its thread, which on CUDA is another.
            every = [None] * ahead.input_count
            for place, tensor in zip(ahead.places, leaves):
                every[place] = tensor
            back = _calls.Backward(ahead.config, every, None, (cotangent, None, None), [True] * len(every), True, ahead.stream, ahead.plan)
            back(leaves, (cotangent,), saved)
            gradients = [torch.empty_like(t) for t in leaves]
            back._tensors.point((*leaves, cotangent, *gradients))
            row("the library's backward", lambda: back._run(leaves))
            row("prepared backward", lambda: back(leaves, (cotangent,), saved))
        row("forward, grad", call)
        row("forward and backward", lambda: torch.autograd.grad(call(), leaves, cotangent))

        class Nothing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *tensors):
                ctx.save_for_backward(*tensors)
                return torch.empty_like(v)

            @staticmethod
            def backward(ctx, _):
                return tuple([torch.empty_like(t) for t in ctx.saved_tensors])

        row("a Function that computes nothing", lambda: torch.autograd.grad(Nothing.apply(*leaves), leaves, cotangent))

        # As in a model: autograd's own thread is woken once for all of a graph's calls.
        graph = [[t.detach().requires_grad_() for t in leaves] for _ in range(IN_GRAPH)]
        every_leaf, cotangents = [t for of in graph for t in of], [cotangent] * IN_GRAPH

        def of_graph(one):
            torch.autograd.grad([one(*of) for of in graph], every_leaf, cotangents)

        def differentiated(q, k, v, g, beta):
            return forward("gated_deltanet", q, k, v, g=g, beta=beta).o

        for name, one in (("forward and backward", differentiated), ("a Function that computes nothing", Nothing.apply)):
            row(f"{name}, {IN_GRAPH} in a graph", lambda: of_graph(one), IN_GRAPH)
    finally:
        fastweight.set_threads(0)
    return rows


def main(device):
    rows = measure(device)
    print(f"{'microseconds a call, B = T = H = 1, K = V = 8':50} {'least':>8} {'median':>8}")
    for name, (least, median) in rows.items():
        print(f"{name:50} {least:8.1f} {median:8.1f}")
    return rows
