"""A case's tensors as torch's, in elements of its type."""

import torch

ELEMENTS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def tensors(case):
    return [torch.from_numpy(tensor).to(ELEMENTS[case.elements]) for tensor in (case.q, case.k, case.v)]


def widened(tensor):
    return tensor.float().contiguous().numpy()
