"""torch: its flash attention for CPUs; for windows and softcap flex_attention, compiled."""

import logging
import math
import os
import pathlib
import time

# Compiled kernels stay with the environment, so that the next run finds them.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(pathlib.Path(__file__).parent.parent / "target" / "inductor"))

# It misses triton, which is for GPUs.
logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from case import Case
from torch_elements import tensors, widened
from worker import Unsupported


class Peer:
    version = torch.__version__

    def __init__(self, precision=None):
        # Of products of f32; torch's own choice is "highest".
        self.precision = precision
        torch.inference_mode().__enter__()
        # The fused path or an error: nothing falls back in silence.
        sdpa_kernel(SDPBackend.FLASH_ATTENTION).__enter__()

    def prepare(self, fields):
        if self.precision is None:
            return self.prepare_way(fields)
        torch.set_float32_matmul_precision(self.precision)
        how = self.prepare_way(fields)
        answers = []
        for precision in "highest", self.precision:
            torch.set_float32_matmul_precision(precision)
            self.run()
            answers.append(self.answer)
        setting = f'set_float32_matmul_precision("{self.precision}")'
        if torch.equal(*answers):
            raise Unsupported(f"{setting} changes no bit of torch's result here")
        return f"{how}, {setting}; its result differs from torch's"

    def prepare_way(self, fields):
        case = self.case = Case(fields)
        if case.head_dim != case.value_dim and not case.latent:
            raise Unsupported("head_dim and value_dim must be equal")
        torch.set_num_threads(case.threads)
        q, k, v = tensors(case)
        if case.window or case.softcap:
            return self.prepare_flex(q, k, v)
        if case.decode:
            # One row a head: those that share keys are rows of one head, and its keys are read once. Half the time of
            # enable_gqa.
            q = q.view(case.batch, case.kv_heads, case.group, case.head_dim)
        if case.latent:
            return self.prepare_latent(q, k)
        options = {"is_causal": case.causal, "enable_gqa": case.group > 1 and not case.decode}

        def run():
            self.answer = scaled_dot_product_attention(q, k, v, **options)

        self.run = run
        return "scaled_dot_product_attention, flash" + (", query heads as rows" if case.decode and case.group > 1 else "")

    def prepare_latent(self, q, k):
        """Its flash attention has one size for keys and values: whole keys are the values, and some of the output is
        dropped. Its plain path, two matrix products, takes columns of keys. Which is faster depends on the machine."""
        size = self.case.value_dim

        def flash():
            self.answer = scaled_dot_product_attention(q, k, k)[..., :size]

        def plain():
            with sdpa_kernel(SDPBackend.MATH):
                self.answer = scaled_dot_product_attention(q, k, k[..., :size])

        self.run = faster(flash, plain)
        way = "flash, whole keys as values" if self.run is flash else "math, first columns of keys as values"
        return f"scaled_dot_product_attention, {way}, query heads as rows"

    def prepare_flex(self, q, k, v):
        case = self.case
        window, cap = case.window or case.kv_len, case.softcap

        def visible(_batch, _head, row, key):
            return (key <= row) & (row - key < window)

        def capped(score, _batch, _head, _row, _key):
            return cap * torch.tanh(score / cap)

        # Made once, as a model would: it depends on lengths alone.
        mask = create_block_mask(visible, None, None, case.q_len, case.kv_len, device="cpu") if case.causal else None
        options = {"block_mask": mask, "score_mod": capped if cap else None, "enable_gqa": case.group > 1}
        compiled = torch.compile(flex_attention, dynamic=False)

        def run():
            self.answer = compiled(q, k, v, **options)

        self.run = run
        return "flex_attention, compiled"

    def output(self):
        return widened(self.answer)


def faster(*ways):
    """The one whose fastest run is the fastest, of a few alternate runs after a first."""
    least = dict.fromkeys(ways, math.inf)
    for run in range(4):
        for way in ways:
            start = time.perf_counter()
            way()
            if run > 0:
                least[way] = min(least[way], time.perf_counter() - start)
    return min(ways, key=least.get)
