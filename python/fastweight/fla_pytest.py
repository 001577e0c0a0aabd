"""pytest -p fastweight.fla_pytest tests/ops/...: flash-linear-attention's own tests with these kernels enabled, and how many calls of each file were served.
A file in which no call was served counts as failed: its tests passed without us. Without a GPU they run on the CPU, where flash-linear-attention's own kernels do not:
a test that calls those fails there."""

import collections

import fla.utils
import pytest
import torch

import fastweight.fla
from fastweight.torch import _serving

_files = collections.defaultdict(lambda: {"passed": 0, "failed": 0, "skipped": 0, "served": 0, "fell_back": 0})

if not torch.cuda.is_available():  # tests make their tensors where these say, which is on CUDA even where there is no device at all; before a conftest asks
    for module in (fla.utils, fla.utils.hardware):
        module.device, module.device_torch_lib = "cpu", torch.cpu


def _totals():
    counts = _serving.counts.values()
    return sum(c.served for c in counts), sum(c.fell_back for c in counts)


def pytest_configure(config):
    fastweight.fla.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.fastweight_before = _totals()


def pytest_runtest_teardown(item):
    row = _files[item.location[0]]
    for key, before, now in zip(("served", "fell_back"), item.fastweight_before, _totals()):
        row[key] += now - before


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome == "skipped":
        _files[report.location[0]][report.outcome] += 1


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("fastweight")
    for file, row in sorted(_files.items()):
        terminalreporter.write_line(f"{file}: " + ", ".join(f"{key} {value}" for key, value in row.items()))
    terminalreporter.write_line(str(fastweight.fla.status()))


def pytest_sessionfinish(session, exitstatus):
    idle = [file for file, row in _files.items() if row["passed"] and not row["served"]]
    if idle and exitstatus == 0:
        session.exitstatus = 1
        print(f"\nfastweight: no call was served in {', '.join(sorted(idle))}")
