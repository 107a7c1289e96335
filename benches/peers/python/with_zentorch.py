"""zentorch: AMD's extension of torch, its operator for attention called as its compiler backend calls it."""

import logging

# It misses triton, which is for GPUs.
logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)

import torch

from case import Case
from torch_elements import tensors, widened
from worker import Unsupported

try:
    import zentorch
except (ImportError, OSError) as refusal:
    raise Unsupported(f"does not load: {refusal}") from refusal

# Its backend for torch.compile replaces nothing without; the operator computes all the same.
AVX512 = zentorch._C.is_avx512_supported()


class Peer:
    version = f"{zentorch.__version__} on torch {torch.__version__}"

    def __init__(self):
        torch.inference_mode().__enter__()

    def prepare(self, fields):
        case = Case(fields)
        if case.head_dim != case.value_dim or case.window or case.softcap:
            raise Unsupported("head_dim and value_dim must be equal; no window, no softcap")
        torch.set_num_threads(case.threads)
        q, k, v = tensors(case)
        if case.decode:
            # As for torch: rows that share keys in one head.
            q = q.view(case.batch, case.kv_heads, case.group, case.head_dim)
        attend = torch.ops.zentorch.zentorch_sdpa

        def run():
            self.answer, _ = attend(q, k, v, is_causal=case.causal)

        self.run = run
        how = "its operator zentorch_sdpa" + (", query heads as rows" if case.decode and case.group > 1 else "")
        return how if AVX512 else how + ", on a machine without the AVX-512 that it is made for"

    def output(self):
        return widened(self.answer)
