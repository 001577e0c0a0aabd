#!/usr/bin/env python3
"""flash-linear-attention's own tests with these kernels enabled, by several processes, and their table.

    tools/fla_tests.py FLA_SOURCE OUT [-n 14] [--seconds 120] [--bfloat16] [FILE ...]

FLA_SOURCE: a checkout of flash-linear-attention (its tests; the package is the installed one). FILES: below it; left out, those of the operations that are served, the layers and the
models. OUT: a folder for a line of JSON a test, written as tests end, and table.md; tests that have a line there already are
not run again. --bfloat16: float16 in a copy of the tests is made bfloat16. What every process needs is imported
once and forked, since a fresh machine reads torch from its disk for half a minute; nothing that touches a GPU happens before. Needs pytest; fastweight must be importable.
"""

import argparse
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time

OPERATIONS = ("gdn", "kda", "delta", "gdn2", "gla", "simple_gla", "retention", "comba", "precond_gated_delta", "precond_kda")
MODELS = ("gated_deltanet", "kda", "deltanet", "comba", "gla", "retnet", "linear_attn", "precond_gated_deltanet", "precond_kda")
FILES = [f"tests/ops/test_{name}.py" for name in OPERATIONS] + ["tests/layers/test_gated_deltanet.py"] + [f"tests/models/test_modeling_{name}.py" for name in MODELS]


def run_part(part, parts, files, out, seconds_a_test, expression):
    os.environ["FASTWEIGHT_FLA_PART"] = f"{part}/{parts}"
    os.environ["FASTWEIGHT_FLA_REPORT"] = str(out)
    log = os.open(out / f"part{part}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import pytest
    import torch

    torch.set_num_threads(1)
    timeout = ["-p", "pytest_timeout", "--timeout", str(seconds_a_test)] if seconds_a_test else []
    return pytest.main(["-q", "-W", "ignore", "-p", "fastweight.fla_pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-k", expression, *timeout, *files])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("-n", type=int, default=os.cpu_count())
    parser.add_argument("-k", default="", help="pytest's")
    parser.add_argument("--seconds", type=float, default=600, help="all processes are ended then; the table says what was not reached")
    parser.add_argument("--seconds-a-test", type=int, default=0, help="with pytest-timeout")
    parser.add_argument("--bfloat16", action="store_true")
    args = parser.parse_intermixed_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest  # noqa: F401: for all
    import torch  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    with tempfile.TemporaryDirectory() as work:
        source = pathlib.Path(work, "fla")
        shutil.copytree(args.source / "tests", source / "tests")
        if args.bfloat16:
            for path in source.rglob("*.py"):
                path.write_text(path.read_text().replace("torch.float16", "torch.bfloat16").replace("torch.half", "torch.bfloat16"))
        os.chdir(source)
        begin, children = time.time(), {}
        for part in range(args.n):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                os._exit(run_part(part, args.n, args.files, args.out, args.seconds_a_test, args.k))
            children[pid] = part
        while children and time.time() - begin < args.seconds:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid:
                children.pop(pid)
            else:
                time.sleep(0.2)
        for pid in children:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    from fastweight.fla_report import table

    text = table(args.out)
    (args.out / "table.md").write_text(text + "\n")
    print(f"{time.time() - begin:.0f} s, {len(children)} of {args.n} processes were cut short")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
