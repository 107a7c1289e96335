"""torch: its flash attention for CPUs, and its backward pass."""

import logging

# It misses triton, which is for GPUs.
logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)

import numpy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from case import Case
from torch_elements import ELEMENTS, tensors, widened
from worker import Unsupported

class Peer:
    version = torch.__version__

    def __init__(self):
        # The fused path or an error: nothing falls back in silence.
        sdpa_kernel(SDPBackend.FLASH_ATTENTION).__enter__()

    def prepare(self, fields):
        case = Case(fields)
        if case.head_dim != case.value_dim or case.window or case.softcap:
            raise Unsupported("head_dim and value_dim must be equal; no window, no softcap")
        torch.set_num_threads(case.threads)
        q, k, v = [tensor.requires_grad_() for tensor in tensors(case)]
        d_out = numpy.fromfile(case.d_out, numpy.float32).reshape(case.batch, case.heads, case.q_len, case.value_dim)
        d_out = torch.from_numpy(d_out).to(ELEMENTS[case.elements])
        options = {"is_causal": case.causal, "enable_gqa": case.group > 1}

        def run():
            out = scaled_dot_product_attention(q, k, v, **options)
            self.gradients = torch.autograd.grad(out, (q, k, v), d_out)

        self.run = run
        return "scaled_dot_product_attention, flash, and torch.autograd.grad"

    def output(self):
        return numpy.concatenate([widened(gradient).ravel() for gradient in self.gradients])
