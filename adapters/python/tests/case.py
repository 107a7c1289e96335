"""What all tests here are made of."""

import unittest

import numpy as np
import oracle


class TestCase(unittest.TestCase):
    """A test that compares arrays."""

    def assert_close(self, got, expected, dtype=np.float32, of="out"):
        """Results differ by rounding of their type, and of sums of float32."""
        self.assertEqual(got.shape, expected.shape, of)
        got, expected = np.asarray(got, dtype=np.float64), np.asarray(expected, dtype=np.float64)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(got[~finite], expected[~finite], of)
        error = np.where(finite, abs(got - np.where(finite, expected, 0)), 0)
        bound = 4e-6 + oracle.ulp(dtype) * abs(np.where(finite, expected, 0))
        worst = np.unravel_index(np.argmax(error - bound), error.shape) if error.size else ()
        self.assertTrue((error <= bound).all(), f"{of}{list(map(int, worst))}: {got[worst]}, but {expected[worst]}")

    def assert_bits(self, got, expected, of="out"):
        """Results are the same to the bit."""
        self.assertEqual((got.dtype, got.shape), (expected.dtype, expected.shape), of)
        self.assertEqual(got.tobytes(), expected.tobytes(), of)

    def refuses(self, kind, message, function, *arguments, **options):
        """A call is refused with a message that begins so."""
        with self.assertRaises(kind) as caught:
            function(*arguments, **options)
        self.assertTrue(str(caught.exception).startswith(message), f"{caught.exception}")
