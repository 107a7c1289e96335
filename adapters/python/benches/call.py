"""Time of a call from Python beside that of the same call in Rust: float32, 12 heads of 64, 512 × 512, one thread.

    python benches/call.py [TURNS]

In turns, shuffled: the installed wheel, the Rust program of call.rs, and torch if it is installed. Each makes four calls a turn, of
which the median of the last three counts. Printed are medians of all turns, and medians of the ratios of one turn.
"""

import pathlib
import random
import statistics
import subprocess
import sys
import time

import numpy as np
import sdpa

try:
    import torch
except ImportError:
    torch = None

SHAPE = (1, 12, 512, 64)


def timed(call):
    """Nanoseconds of a call: the median of three, after one that does not count."""
    times = []
    for _ in range(4):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times[1:])


def main():
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 101
    package = pathlib.Path(__file__).resolve().parent.parent
    command = ["cargo", "bench", "--quiet", "--locked", "--bench", "call"]
    rust = subprocess.Popen(command, cwd=package, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def in_rust(output):
        print(output, file=rust.stdin)
        return int(rust.stdout.readline())

    q, k, v = np.random.default_rng(1).uniform(-1, 1, (3, *SHAPE)).astype(np.float32)
    out = np.empty(SHAPE, np.float32)
    attend = sdpa.scaled_dot_product_attention
    cases = {
        "Rust, kept output": lambda: in_rust("kept"),
        "Python, kept output": lambda: timed(lambda: attend(q, k, v, out=out, threads=1)),
        "Rust, new output": lambda: in_rust("new"),
        "Python, new output": lambda: timed(lambda: attend(q, k, v, threads=1)),
    }
    if torch is not None:
        torch.set_num_threads(1)
        tensors = [torch.from_numpy(x) for x in (q, k, v)]
        cases["torch"] = lambda: timed(lambda: torch.nn.functional.scaled_dot_product_attention(*tensors))
    else:
        print("skipped: torch is not installed")
    times = {name: [] for name in cases}
    for turn in range(turns + 1):
        for name in random.sample(list(cases), len(cases)):
            elapsed = cases[name]()
            if turn > 0:  # The first waits for the build.
                times[name].append(elapsed)
    rust.stdin.close()
    rust.wait()
    of = {"Python, kept output": "Rust, kept output", "Python, new output": "Rust, new output", "torch": "Rust, new output"}
    for name, own in times.items():
        ratio = ""
        if name in of:
            ratio = f"   {statistics.median(a / b for a, b in zip(own, times[of[name]])):.3f} of {of[name]}"
        print(f"{name:>20} {statistics.median(own) / 1e6:8.3f} ms{ratio}")


if __name__ == "__main__":
    main()
