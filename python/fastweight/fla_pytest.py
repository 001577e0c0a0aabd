"""pytest -p fastweight.fla_pytest tests/ops/...: flash-linear-attention's own tests with these kernels enabled, and how many calls of each file were served.
A file in which no call was served counts as failed: its tests passed without us. Without a GPU they run on the CPU, where flash-linear-attention's own kernels do not:
a test that calls those fails there.

FASTWEIGHT_FLA_REPORT=FOLDER keeps a line of JSON for every test, written when it ends, so that a run that is cut short tells of what it reached (one file a process, pytest-xdist
too); `python -m fastweight.fla_report FOLDER` makes the table of them: tests, passed, failed, skipped, not reached, calls served and not, and every failure with its reason.
What has ended there already is not run again.
FASTWEIGHT_FLA_PART=i/n runs every n-th test from the i-th (from 0) of an order in which a run that is cut short has reached some of every file: for n processes at once."""

import collections
import json
import os
import pathlib
import zlib

import pytest

from fastweight import fla_report

_files = collections.defaultdict(lambda: dict.fromkeys(fla_report.COUNTS, 0))
_REASON = 600  # characters kept of a failure


def _totals():
    from fastweight.torch import _serving

    counts = _serving.counts.values()
    reasons = collections.Counter()
    for count in counts:
        reasons.update(count.reasons)
    return sum(c.served for c in counts), sum(c.fell_back for c in counts), reasons


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Tests make their tensors where these say, which is on CUDA even where there is no device at all; a conftest asks when it is loaded."""
    import fla.utils
    import torch

    if not torch.cuda.is_available():
        for module in (fla.utils, fla.utils.hardware):
            module.device, module.device_torch_lib = "cpu", torch.cpu


def pytest_configure(config):
    import fastweight.fla

    fastweight.fla.enable()


def _write(line):
    folder = os.environ.get("FASTWEIGHT_FLA_REPORT")
    if folder:
        name = os.environ.get("PYTEST_XDIST_WORKER") or "part" + os.environ.get("FASTWEIGHT_FLA_PART", "0/1").replace("/", "of")
        with open(pathlib.Path(folder, f"{name}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_collection_modifyitems(config, items):
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        _write({"collected": dict(collections.Counter(item.location[0] for item in items))})
    part, _, parts = os.environ.get("FASTWEIGHT_FLA_PART", "").partition("/")
    if parts:
        ordered = sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()))
        items[:] = ordered[int(part) :: int(parts)]
    if os.environ.get("FASTWEIGHT_FLA_REPORT"):
        ended = {line["test"] for line in fla_report.lines(os.environ["FASTWEIGHT_FLA_REPORT"]) if "test" in line}
        items[:] = [item for item in items if item.nodeid not in ended]


def pytest_runtest_logstart(nodeid, location):
    _write({"began": nodeid})


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.fastweight_before = _totals()


def pytest_runtest_teardown(item):
    before, now = item.fastweight_before, _totals()
    item.user_properties += [("served", now[0] - before[0]), ("fell_back", now[1] - before[1]), ("reasons", dict(now[2] - before[2]))]


def _reason(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return f"{os.path.basename(crash.path)}:{crash.lineno}: {crash.message}"[:_REASON]
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)[-_REASON:]


_outcomes = {}


def pytest_runtest_logreport(report):
    row = _files[report.location[0]]
    if report.when == "call" or report.outcome != "passed":
        row[report.outcome] += 1
        _outcomes[report.nodeid] = (report.outcome, None if report.passed else _reason(report), report.duration)
    if report.when != "teardown":
        return
    properties = dict(report.user_properties)
    for key in ("served", "fell_back"):
        row[key] += properties.get(key, 0)
    outcome, reason, seconds = _outcomes.pop(report.nodeid, ("skipped", None, 0.0))
    line = {"test": report.nodeid, "outcome": outcome, "seconds": round(seconds, 2), **{key: properties.get(key) for key in ("served", "fell_back", "reasons")}}
    _write({**line, "reason": reason} if reason else line)


def pytest_terminal_summary(terminalreporter):
    import fastweight.fla

    terminalreporter.section("fastweight")
    for file, row in sorted(_files.items()):
        terminalreporter.write_line(f"{file}: " + ", ".join(f"{key} {value}" for key, value in row.items()))
    if not hasattr(terminalreporter.config, "workerinput") and not getattr(terminalreporter.config.option, "numprocesses", None):
        terminalreporter.write_line(str(fastweight.fla.status()))


def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workerinput"):  # the process that gathers the reports says it
        return
    idle = [file for file, row in _files.items() if row["passed"] and not row["served"]]
    if idle and exitstatus == 0:
        session.exitstatus = 1
        print(f"\nfastweight: no call was served in {', '.join(sorted(idle))}")
