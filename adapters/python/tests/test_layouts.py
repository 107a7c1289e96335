"""Arrays as they lie in memory: any strides, any number of leading dimensions, no copies."""

import resource
import tracemalloc
import unittest

import numpy as np
import oracle
import sdpa
from case import TestCase
from numpy.lib.stride_tricks import as_strided
from oracle import qkv, random


def layouts(x):
    """The same numbers, in other places."""
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1] + 3), np.nan, x.dtype)
    wide[..., 1 : 1 + 2 * x.shape[-1] : 2] = x
    return {
        "rows first": np.swapaxes(np.ascontiguousarray(np.swapaxes(x, 1, 2)), 1, 2),
        "transposed": np.swapaxes(np.ascontiguousarray(np.swapaxes(x, 2, 3)), 2, 3),
        "every other element": wide[..., 1 : 1 + 2 * x.shape[-1] : 2],
        "reversed": np.ascontiguousarray(x[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1],
        "fortran": np.asfortranarray(x),
        "part of a record": record(x),
    }


def record(x):
    """Elements with a number of 32 bits behind each."""
    records = np.zeros(x.shape, dtype=[("x", x.dtype), ("other", x.dtype)])
    records["other"], records["x"] = np.nan, x
    return records["x"]


class Layouts(TestCase):
    def test_strides_do_not_change_bits(self):
        arrays = qkv(rows=20, keys=300)
        mask = np.random.default_rng(4).random((2, 4, 20, 300)) < 0.6
        bias = random(2, 4, 20, 300, seed=5)
        expected = sdpa.scaled_dot_product_attention(*arrays, mask, bias=bias)
        for name in layouts(arrays[0]):
            q, k, v, bias_too = (layouts(x)[name] for x in (*arrays, bias))
            of_mask = layouts(mask).get(name) if name not in ("every other element", "part of a record") else mask[...]
            for x in (q, k, v):
                self.assertFalse(x.flags.c_contiguous, name)
                x.flags.writeable = False
            got = sdpa.scaled_dot_product_attention(q, k, v, of_mask, bias=bias_too)
            self.assertEqual(got.tolist(), expected.tolist(), name)

    def test_output_lies_as_the_queries_do(self):
        q, k, v = (layouts(x)["rows first"] for x in qkv())
        out = sdpa.scaled_dot_product_attention(q, k, v)
        joined = out.swapaxes(1, 2).reshape(2, 7, 4 * 16)
        self.assertTrue(np.shares_memory(joined, out))
        self.assertTrue(sdpa.scaled_dot_product_attention(*qkv()).flags.c_contiguous)

    def test_packed_projection(self):
        packed = random(2, 9, 3, 4, 16, seed=1)
        q, k, v = packed.transpose(2, 0, 3, 1, 4)
        got = sdpa.scaled_dot_product_attention(q, k, v)
        self.assertEqual(got.tolist(), sdpa.scaled_dot_product_attention(*map(np.ascontiguousarray, (q, k, v))).tolist())

    def test_leading_dimensions(self):
        for leading in [(), (3,), (2, 3), (2, 2, 3), (1, 2, 1, 3), (2, 0, 3)]:
            q, k, v = (random(*leading, n, 16, seed=n) for n in (7, 11, 11))
            for causal in [False, True]:
                got, lse = sdpa.scaled_dot_product_attention(q, k, v, is_causal=causal, return_lse=True)
                expected = oracle.attend(q, k, v, is_causal=causal)
                self.assert_close(got, expected[0], of=f"{leading}: out")
                self.assert_close(lse, expected[1], of=f"{leading}: lse")

    def test_broadcast_leading_dimensions(self):
        q, k, v = random(5, 3, 7, 16, seed=1), random(3, 11, 16, seed=2), random(1, 3, 11, 16, seed=3)
        more = random(2, 5, 3, 7, 16, seed=4)
        for arrays in [(q, k, v), (q[:1], k, v), (q[0], q, q), (q[0, 0], k[0], k[1]), (more, more[0, :1, :, :4], v[..., :4, :])]:
            got, lse = sdpa.scaled_dot_product_attention(*arrays, return_lse=True)
            expected, expected_lse = oracle.attend(*arrays)
            self.assert_close(got, expected)
            self.assert_close(lse, np.broadcast_to(expected_lse, got.shape[:-1]))

    def test_masks_of_more_dimensions(self):
        q, k, v = (random(2, 3, 4, n, 16, seed=n) for n in (7, 11, 11))
        for shape in [(2, 3, 4, 7, 11), (1, 1, 4, 7, 1), (7, 11), (1, 1, 4, 1, 1), (2, 3, 1, 1, 11)]:
            mask = np.random.default_rng(4).random(shape) < 0.6
            self.assert_close(sdpa.scaled_dot_product_attention(q, k, v, mask), oracle.attend(q, k, v, mask)[0])

    def test_leading_dimensions_that_take_a_copy_are_refused(self):
        q, k, v = (random(2, 3, 4, n, 16, seed=n) for n in (7, 11, 11))
        mask = np.ones((2, 1, 1, 7, 11), dtype=bool)
        swapped = np.swapaxes(np.ascontiguousarray(np.swapaxes(k, 0, 1)), 0, 1)
        message = "the strides of dimensions [2, 3] do not make one of them, which takes a copy"
        attend = sdpa.scaled_dot_product_attention
        self.refuses(ValueError, f"key: shape is [2, 3, 4, 11, 16]: {message}", attend, q, swapped, v)
        self.refuses(ValueError, f"attn_mask: shape is [2, 3, 1, 7, 11]: {message}", attend, q, k, v, mask)

    def test_out(self):
        arrays = qkv()
        expected, expected_lse = sdpa.scaled_dot_product_attention(*arrays, return_lse=True)
        for name, out in layouts(expected).items():
            before = np.array(out.base) if out.base is not None else None
            out[...] = 7
            got, lse = sdpa.scaled_dot_product_attention(*arrays, out=out, return_lse=True)
            self.assertIs(got, out)
            self.assertEqual(out.tolist(), expected.tolist(), name)
            self.assert_bits(lse, expected_lse, name)
            if name == "every other element":
                np.testing.assert_array_equal(out.base, before)  # NaN between the elements is still there.

    def test_out_beside_inputs(self):
        buffer = np.zeros(2 * 4 * (7 + 11 + 11) * 16 + 2 * 4 * 7 * 16, np.float32)
        arrays, start = [], 0
        for x in qkv():
            arrays.append(buffer[start : start + x.size].reshape(x.shape))
            arrays[-1][...] = x
            start += x.size
        out = buffer[start:].reshape(2, 4, 7, 16)
        sdpa.scaled_dot_product_attention(*arrays, out=out)
        self.assert_bits(out, sdpa.scaled_dot_product_attention(*qkv()))

    def test_inputs_may_be_one_array(self):
        x = qkv()[0]
        self.assert_close(sdpa.scaled_dot_product_attention(x, x, x), oracle.attend(x, x, x)[0])

    def test_nothing_is_copied(self):
        # Keys and values of 4 GiB each, if they were dense; numpy's allocations, and those of the whole process.
        batch, row = 1 << 14, random(1, 1, 1, 64, seed=1)
        q, kv = (np.broadcast_to(row, (batch, 1, rows, 64)) for rows in (1, 1 << 10))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tracemalloc.start()
        out = sdpa.scaled_dot_product_attention(q, kv, kv)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        self.assertLess(peak, out.nbytes + (1 << 16))
        self.assertLess(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, 1 << 18, "KiB")
        np.testing.assert_allclose(out, np.broadcast_to(row, out.shape), rtol=1e-5)

    def test_elements_that_overlap(self):
        # A Toeplitz array: row i is elements i, i + 1, …
        line = random(40, seed=1)
        x = as_strided(line, (1, 1, 24, 16), (0, 0, 4, 4))
        self.assert_close(sdpa.scaled_dot_product_attention(x, x, x), oracle.attend(x, x, x)[0])


if __name__ == "__main__":
    unittest.main()
