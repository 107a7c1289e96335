"""A case as src/case.rs writes it."""

import numpy


class Case:
    def __init__(self, fields):
        self.__dict__.update(fields)
        kv = [self.batch, self.kv_heads, self.kv_len]
        shapes = [self.batch, self.heads, self.q_len, self.head_dim], [*kv, self.head_dim], [*kv, self.value_dim]
        tensors = [numpy.fromfile(file, numpy.float32).reshape(shape) for file, shape in zip(self.files, shapes)]
        self.q, self.k, self.v = tensors
        self.group = self.heads // self.kv_heads
        self.decode = self.q_len == 1
        # Values are the first columns of keys; `v` is a copy of them.
        self.latent = self.values == "in_keys"


def bf16_bits(tensor):
    """Numbers that bf16 holds, as its bits."""
    return (numpy.ascontiguousarray(tensor).view(numpy.uint32) >> 16).astype(numpy.uint16)


def bf16_numbers(bits):
    """And back."""
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


def packed(tensor):
    """[batch, heads, rows, dim] as [batch, rows, heads · dim]."""
    batch, _, rows, _ = tensor.shape
    return numpy.ascontiguousarray(tensor.transpose(0, 2, 1, 3).reshape(batch, rows, -1))


def unpacked(tensor, heads):
    """And back."""
    batch, rows, _ = tensor.shape
    return tensor.reshape(batch, rows, heads, -1).transpose(0, 2, 1, 3)
