"""Element types: float32, float16 and bfloat16, of ml_dtypes and as bits, in any mix."""

import itertools
import unittest

import numpy as np
import oracle
import sdpa
from case import TestCase
from oracle import qkv, random

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None


def bits(x):
    """Numbers of float32 as the bits of bfloat16, rounded to nearest even."""
    x = x.view(np.uint32)
    return ((x + 0x7FFF + (x >> 16 & 1)) >> 16).astype(np.uint16)


def widened(x):
    """The same numbers in float32."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


KINDS = {"float32": lambda x: x, "float16": lambda x: x.astype(np.float16), "bits": bits}


class Types(TestCase):
    def test_every_mix_has_the_bits_of_widening_first(self):
        for kinds in itertools.product(KINDS, repeat=4):
            q, k, v, bias = (KINDS[kind](x) for kind, x in zip(kinds, (*qkv(), random(7, 11, seed=4))))
            wide = [widened(x) for x in (q, k, v)]
            expected = sdpa.scaled_dot_product_attention(*wide, bias=widened(bias))
            got = sdpa.scaled_dot_product_attention(q, k, v, bias=bias, uint16_as="bfloat16")
            self.assert_bits(got, KINDS[kinds[0]](expected), str(kinds))
            as_mask = sdpa.scaled_dot_product_attention(q, k, v, bias, uint16_as="bfloat16")
            self.assert_bits(as_mask, got, str(kinds))

    def test_out_of_every_type(self):
        for of_inputs, of_out in itertools.product(KINDS, repeat=2):
            arrays = [KINDS[of_inputs](x) for x in qkv()]
            expected = KINDS[of_out](sdpa.scaled_dot_product_attention(*map(widened, arrays)))
            out = np.zeros_like(expected)
            sdpa.scaled_dot_product_attention(*arrays, out=out, uint16_as="bfloat16")
            self.assert_bits(out, expected, f"{of_inputs}, {of_out}")

    def test_error_of_short_types(self):
        arrays = [x.astype(np.float16) for x in qkv(rows=50, keys=300)]
        got, lse = sdpa.scaled_dot_product_attention(*arrays, return_lse=True)
        expected, expected_lse = oracle.attend(*arrays)
        self.assert_close(got, expected, np.float16)
        self.assert_close(lse, expected_lse)
        self.assertEqual(lse.dtype, np.float32)

    def test_precisions(self):
        arrays = [bits(x) for x in qkv(rows=50, keys=300)]
        exact = sdpa.scaled_dot_product_attention(*arrays, uint16_as="bfloat16", precision="exact")
        self.assert_bits(exact, sdpa.scaled_dot_product_attention(*arrays, uint16_as="bfloat16"))
        expected = oracle.attend(*map(widened, arrays))[0]
        for precision in ["native", "accurate"]:
            got = sdpa.scaled_dot_product_attention(*arrays, uint16_as="bfloat16", precision=precision)
            np.testing.assert_allclose(widened(got), expected, atol=0.02)

    @unittest.skipIf(ml_dtypes is None, "ml_dtypes is not installed")
    def test_bfloat16_of_ml_dtypes(self):
        arrays = [x.astype(ml_dtypes.bfloat16) for x in qkv()]
        expected = sdpa.scaled_dot_product_attention(*(x.view(np.uint16) for x in arrays), uint16_as="bfloat16")
        got = sdpa.scaled_dot_product_attention(*arrays)
        self.assert_bits(got, expected.view(ml_dtypes.bfloat16))
        self.assert_close(got, oracle.attend(*arrays)[0], ml_dtypes.bfloat16)
        strided = [np.swapaxes(np.swapaxes(x, 1, 2).copy(), 1, 2)[:, ::-1] for x in arrays]
        out = np.zeros_like(got)[:, ::-1]
        sdpa.scaled_dot_product_attention(*strided, out=out)
        self.assertEqual(out[:, ::-1].tolist(), got.tolist())
        self.assertEqual(sdpa.scaled_dot_product_attention(*strided).dtype, ml_dtypes.bfloat16)


if __name__ == "__main__":
    unittest.main()
