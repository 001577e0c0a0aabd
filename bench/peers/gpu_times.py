"""Times of calls on a GPU."""

import statistics

import torch


def median_ms(call):
    """Milliseconds by events: the median of 20 calls after 5."""
    times = []
    for i in range(25):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        if i >= 5:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)
