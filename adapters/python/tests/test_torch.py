"""The arguments that torch has too: the same meaning, by position."""

import itertools
import unittest

import numpy as np
import sdpa
from case import TestCase
from oracle import random

try:
    import torch
except ImportError:
    torch = None


@unittest.skipIf(torch is None, "torch is not installed")
class Torch(TestCase):
    def check(self, *arguments, **named):
        """Both functions, given the same arguments, in float32 and, torch's, in float64 too."""

        def theirs(dtype):
            tensors = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in arguments]
            tensors = [x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in tensors]
            return torch.nn.functional.scaled_dot_product_attention(*tensors, **named).numpy()

        got = sdpa.scaled_dot_product_attention(*arguments, **named)
        np.testing.assert_allclose(got, theirs(torch.float32), atol=1e-5)
        self.assert_close(got, theirs(torch.float64))

    def test_shapes_masks_and_scales(self):
        for leading in [(), (3,), (2, 3), (2, 2, 3)]:
            for rows, keys in [(7, 7), (3, 9), (9, 3), (1, 5)]:
                q, k, v = (random(*leading, n, 16, seed=seed) for n, seed in ((rows, 1), (keys, 2), (keys, 3)))
                mask = np.random.default_rng(4).random((rows, keys)) < 0.6
                mask[:, 0] = True
                floats = random(*leading[-1:], rows, keys, seed=5)
                for scale in [None, 0.3, 1.5]:
                    self.check(q, k, v, None, 0.0, True, scale=scale)
                    for attn_mask in [None, mask, mask[:1], floats]:
                        self.check(q, k, v, attn_mask, 0.0, False, scale=scale)

    def test_rows_that_see_nothing(self):
        q, k, v = (random(1, 2, n, 16, seed=n) for n in (5, 6, 6))
        mask = np.ones((5, 6), bool)
        mask[2] = False
        self.check(q, k, v, mask)

    def test_grouped_heads(self):
        for heads, kv_heads, leading in itertools.product([4], [1, 2, 4], [(), (2,)]):
            q, k, v = (random(*leading, h, n, 16, seed=n) for h, n in ((heads, 5), (kv_heads, 6), (kv_heads, 7)))
            self.check(q, k, v[..., :6, :], None, 0.0, False, enable_gqa=True)
            self.check(q, k, v[..., :6, :], None, 0.0, True, scale=0.5, enable_gqa=True)

    def test_views_of_tensors(self):
        q, k, v = torch.randn(2, 9, 3, 4, 16).permute(2, 0, 3, 1, 4)
        out = torch.empty(2, 9, 4, 16).transpose(1, 2)
        got = sdpa.scaled_dot_product_attention(q.numpy(), k.numpy(), v.numpy(), out=out.numpy())
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        np.testing.assert_allclose(out.numpy(), theirs.numpy(), atol=1e-5)
        self.assertTrue(np.shares_memory(got, out.numpy()))

    def test_bits_of_bfloat16(self):
        q, k, v = (torch.randn(1, 2, n, 16, dtype=torch.bfloat16) for n in (5, 6, 6))
        bits = [x.view(torch.uint16).numpy() for x in (q, k, v)]
        got = torch.from_numpy(sdpa.scaled_dot_product_attention(*bits, uint16_as="bfloat16")).view(torch.bfloat16)
        theirs = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
        np.testing.assert_allclose(got.float().numpy(), theirs.numpy(), rtol=2**-7, atol=1e-4)

    def test_what_torch_refuses_too(self):
        q, k, v = (random(1, h, 6, 16, seed=h) for h in (4, 2, 2))
        with self.assertRaises(ValueError):
            sdpa.scaled_dot_product_attention(q, k, v)
        with self.assertRaises(RuntimeError):
            torch.nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)))


if __name__ == "__main__":
    unittest.main()
