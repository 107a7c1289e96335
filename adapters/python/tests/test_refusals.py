"""What callers get wrong: every refusal with its message, and `out` untouched by it."""

import unittest

import numpy as np
import sdpa
from case import TestCase
from numpy.lib.stride_tricks import as_strided
from oracle import qkv, random


def unaligned(x):
    """The same numbers, a byte behind where they could be read at once."""
    data = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    data[...] = x
    return data


class Refusals(TestCase):
    def setUp(self):
        self.q, self.k, self.v = qkv()

    def refused(self, kind, message, *, query=None, key=None, value=None, **options):
        """A call with these arguments in place of its own is refused, writes nothing, and is explained as little."""
        arrays = [own if own is not None else x for own, x in ((query, self.q), (key, self.k), (value, self.v))]
        out = np.full((2, 4, 7, 16), 7, np.float32)
        self.refuses(kind, message, sdpa.scaled_dot_product_attention, *arrays, **({"out": out} | options))
        self.assertTrue((out == 7).all())
        self.refuses(kind, message, sdpa.explain, *arrays, **({"out": out} | options))

    def test_shapes(self):
        self.refused(ValueError, "key: head_dim is 9, but query has 16", key=random(2, 4, 11, 9, seed=1))
        self.refused(ValueError, "value: rows is 12, but key has 11", value=random(2, 4, 12, 16, seed=1))
        self.refused(ValueError, "value: heads is 2, but key has 4", value=random(2, 2, 11, 16, seed=1))
        message = "shape is [3, 4, 11, 16]: a leading dimension is 3, but query or key has 2"
        self.refused(ValueError, f"key: {message}", key=random(3, 4, 11, 16, seed=1))
        self.refused(ValueError, f"value: {message}", value=random(3, 4, 11, 16, seed=1))
        message = "query: shape is [16], but must be [..., heads, rows, dim]"
        self.refused(ValueError, message, query=random(16, seed=1))
        empty = [np.zeros((2, 4, n, 0), np.float32) for n in (7, 11)]
        self.refused(ValueError, "query: head_dim is 0, but must be at least 1", query=empty[0], key=empty[1])

    @unittest.skipIf(np.__version__ < "2", "arrays of this numpy have at most 32 dimensions")
    def test_dimensions(self):
        many = np.zeros((*(1,) * 29, *self.q.shape), np.float32)
        self.refused(ValueError, "query: 33 dimensions, but must have at most 32", query=many, out=many.copy())

    def test_more_sequences_than_there_can_be(self):
        many = [np.broadcast_to(self.q, shape + self.q.shape) for shape in ((1 << 30, 1, 1), (1, 1 << 30, 1), (1, 1, 8))]
        message = "query: leading dimensions [1073741824, 1073741824, 8, 2] do not fit the address space"
        self.refuses(ValueError, message, sdpa.scaled_dot_product_attention, *many)

    def test_heads(self):
        key = random(2, 2, 11, 16, seed=1)
        message = "key: heads is 2, but query has 4: enable_gqa=True lets query heads share heads of key and value"
        self.refused(ValueError, message, key=key, value=key)
        key = random(2, 3, 11, 16, seed=1)
        message = "query: heads is 4, but must be a multiple of 3, those of key"
        self.refused(ValueError, message, key=key, value=key, enable_gqa=True)

    def test_types(self):
        expected = "but must be float32, float16 or bfloat16"
        for dtype in [np.float64, np.int32, np.complex64, ">f4", "S4"]:
            name = np.dtype(dtype)
            self.refused(TypeError, f"query: type is {name}, {expected}, in native", query=np.zeros(self.q.shape, dtype))
        uint16 = np.zeros(self.k.shape, np.uint16)
        self.refused(TypeError, f"key: type is uint16, {expected}: uint16_as='bfloat16' reads", key=uint16)
        self.refused(TypeError, "value: type is list, but must be numpy.ndarray", value=self.v.tolist())
        self.refuses(TypeError, "key: type is NoneType", sdpa.scaled_dot_product_attention, self.q, None, self.v)
        mask = np.ones((7, 11), np.uint8)
        self.refused(TypeError, "attn_mask: type is uint8, but must be bool, float32,", attn_mask=mask)
        self.refused(TypeError, f"bias: type is bool, {expected}", bias=mask.astype(bool))
        self.refused(TypeError, f"out: type is float64, {expected}", out=np.zeros((2, 4, 7, 16)))

    def test_memory(self):
        message = "its elements are not aligned in memory"
        self.refused(ValueError, f"query: {message}", query=unaligned(self.q))
        self.refused(ValueError, f"bias: {message}", bias=unaligned(random(7, 11, seed=1)))
        self.refused(ValueError, f"out: {message}", out=unaligned(self.q))
        records = np.zeros(self.k.shape, dtype=[("x", np.float32), ("byte", np.uint8)])
        self.refused(ValueError, f"key: {message}", key=records["x"])

    def test_masks(self):
        scores = "but must be broadcast to [2, 4, 7, 11] (batch, heads, rows, keys)"
        for shape, four in [((7, 10), [1, 1, 7, 10]), ((6, 11), [1, 1, 6, 11]), ((3, 7, 11), [1, 3, 7, 11])]:
            self.refused(ValueError, f"attn_mask: shape is {four}, {scores}", attn_mask=np.ones(shape, bool))
            self.refused(ValueError, f"attn_mask: shape is {four}, {scores}", attn_mask=np.ones(shape, np.float32))
            self.refused(ValueError, f"bias: shape is {four}, {scores}", bias=np.ones(shape, np.float32))
        for shape in [(3, 1, 7, 11), (2, 1, 1, 7, 11)]:
            message = f"attn_mask: shape is {list(shape)}, but must be broadcast to [2] and heads, rows, keys"
            self.refused(ValueError, message, attn_mask=np.ones(shape, bool))
        floats = np.ones((7, 11), np.float32)
        message = "bias: attn_mask is a bias too, since its elements are floats: add one to the other"
        self.refused(ValueError, message, attn_mask=floats, bias=floats)

    def test_numbers(self):
        self.refused(ValueError, "scale: inf, but must be finite", scale=float("inf"))
        self.refused(TypeError, "scale: type is str, but must be float or None", scale="0.5")
        self.refused(ValueError, "softcap: -1, but must be positive and finite", softcap=-1)
        self.refused(ValueError, "dropout_p: 1, but must be at least 0 and below 1", dropout_p=1.0, dropout_seed=1)
        self.refused(ValueError, "dropout_p: 0.5, but dropout_seed is None", dropout_p=0.5)
        self.refused(ValueError, "dropout_seed: -1, but must be int from 0 to 2**64 - 1", dropout_seed=-1)
        self.refused(ValueError, "dropout_seed: 18446744073709551616, but must be int", dropout_seed=2**64)
        self.refused(TypeError, "dropout_seed: type is float, but must be int", dropout_seed=1.0)
        self.refused(TypeError, "is_causal: type is int, but must be bool", is_causal=1)
        self.refused(TypeError, "enable_gqa: type is NoneType, but must be bool", enable_gqa=None)
        self.refused(TypeError, "return_lse: type is str, but must be bool", return_lse="yes")

    def test_words(self):
        self.refused(ValueError, 'precision: "best", but must be', precision="best")
        self.refused(ValueError, 'uint16_as: "float16", but must be', uint16_as="float16")
        self.refused(ValueError, 'alignment: "left", but must be', alignment="left")
        self.refused(TypeError, "alignment: type is float, but must be", alignment=1.5)
        self.refused(ValueError, 'isa: "sse", but must be one of ["portable"', isa="sse")
        self.refused(ValueError, "threads: 0, but must be at least 1", threads=0)
        self.refused(TypeError, "threads: type is str", threads="all")

    def test_rules(self):
        self.refused(ValueError, "window: right is -1, but must be at least 0, or None", window=(1, -1))
        self.refused(TypeError, "window: type is int, but must be tuple", window=3)
        message = "7 rows and 11 keys differ, and no alignment says where the rows stand"
        self.refused(ValueError, f"window: {message}", window=(1, 1))
        self.refused(ValueError, f"alibi: {message}", alibi=[1.0] * 4)
        self.refused(ValueError, "alibi: inf, but must be finite", alibi=[np.inf] * 4, alignment=0)
        self.refused(ValueError, "alibi: length is 3, but query (heads) has 4", alibi=np.ones(3))
        self.refused(ValueError, "sinks: length is 5, but query (heads) has 4", sinks=[0.0] * 5)
        self.refused(TypeError, "sinks: type is ndarray, but must be sequence of float", sinks=np.ones((2, 2)))

    def test_lengths(self):
        self.refused(ValueError, "kv_lens: length is 3, but the batch has 2", kv_lens=[1, 2, 3])
        self.refused(ValueError, "kv_lens: entry 1 is 12, but must be at most 11", kv_lens=np.array([11, 12]))
        self.refused(ValueError, "kv_lens: entry 0 is -1, but must be at least 0", kv_lens=[-1, 2])
        self.refused(TypeError, "kv_lens: type is list, but must be sequence of int", kv_lens=[1.5, 2])

    def test_out(self):
        self.refused(ValueError, "out: shape is [2, 4, 7, 15], but must be [2, 4, 7, 16]", out=self.q[..., :15])
        frozen = np.zeros_like(self.q)
        frozen.flags.writeable = False
        self.refused(ValueError, "out: the array is read-only", out=frozen)
        twice = as_strided(np.zeros(16 * 7 * 4, np.float32), (2, 4, 7, 16), (0, 4 * 7 * 16, 4 * 16, 4))
        message = "out: shape [2, 4, 7, 16] with strides of [0, 448, 64, 4] bytes holds an element twice"
        self.refused(ValueError, message, out=twice)
        near = as_strided(np.zeros(2000, np.float32), (2, 4, 7, 16), (1792, 448, 60, 4))
        self.refused(ValueError, "out: shape [2, 4, 7, 16] with strides of [1792, 448, 60, 4] bytes holds", out=near)

    def test_out_that_shares_memory(self):
        square = random(2, 4, 11, 16, seed=1)
        buffer = np.zeros(2 * square.size, np.float32)
        buffer[: square.size] = square.ravel()
        x, moved = buffer[: square.size].reshape(square.shape), buffer[8:][: square.size].reshape(square.shape)
        y = np.zeros_like(square)
        before = x.copy()
        alias = np.frombuffer(memoryview(buffer), np.float32)[: square.size].reshape(square.shape)
        for name in ["query", "key", "value"]:
            for out in [x, moved, alias, x[::-1], x[:, :, :, ::-1]]:
                arrays = {n: x if n == name else y for n in ("query", "key", "value")}
                message = f"out: shares memory with {name}"
                self.refuses(ValueError, message, sdpa.scaled_dot_product_attention, **arrays, out=out)
        bias = buffer[: 11 * 11].reshape(11, 11)
        for argument in ["attn_mask", "bias"]:
            message = f"out: shares memory with {argument}"
            self.refuses(ValueError, message, sdpa.scaled_dot_product_attention, y, y, y, **{argument: bias}, out=x)
        np.testing.assert_array_equal(x, before)

    def test_unknown_names(self):
        with self.assertRaises(TypeError):
            sdpa.scaled_dot_product_attention(self.q, self.k, self.v, soft=1.0)
        with self.assertRaises(TypeError):  # Options that torch does not have are given by name.
            sdpa.scaled_dot_product_attention(self.q, self.k, self.v, None, 0.0, False, None, False, 30.0)


if __name__ == "__main__":
    unittest.main()
