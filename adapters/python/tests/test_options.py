"""Every option, held against numpy in float64."""

import itertools
import unittest

import numpy as np
import oracle
import sdpa
from case import TestCase
from oracle import qkv, random

INFINITY = np.float32(np.inf)


def options(heads, rows, keys):
    """A value of each option, by name."""
    mask = np.random.default_rng(4).random((2, heads, rows, keys)) < 0.6
    mask[0, :, 2] = False  # A row that sees nothing.
    return {
        "is_causal": True,
        "scale": 0.3,
        "softcap": 1.5,
        "attn_mask": mask,
        "bias": random(1, heads, rows, keys, seed=5),
        "alibi": [0.5 / (n + 1) for n in range(heads)],
        "sinks": random(heads, seed=6),
        "window": (3, 2),
        "kv_lens": [keys, 4],
    }


class Options(TestCase):
    def check(self, arrays, given, **ours):
        got, lse = sdpa.scaled_dot_product_attention(*arrays, **given, **ours, return_lse=True)
        expected, expected_lse = oracle.attend(*arrays, **given)
        self.assertEqual((got.dtype, lse.dtype), (np.float32, np.float32))
        self.assert_close(got, expected, of=f"{list(given)}: out")
        self.assert_close(lse, expected_lse, of=f"{list(given)}: lse")

    def test_without_options(self):
        for rows, keys in [(1, 1), (7, 11), (0, 5), (5, 0), (40, 600)]:
            with self.subTest(rows=rows, keys=keys):
                self.check(qkv(rows=rows, keys=keys), {})

    def test_every_pair(self):
        arrays, values = qkv(), options(4, 7, 11)
        for names in [*itertools.combinations(values, 1), *itertools.combinations(values, 2)]:
            for alignment in ["top-left", "bottom-right", 2]:
                if "kv_lens" in names and alignment == "bottom-right":
                    continue  # The oracle's lengths are padding, behind which nobody stands.
                self.check(arrays, {name: values[name] for name in names} | {"alignment": alignment})

    def test_all_at_once(self):
        self.check(qkv(rows=40, keys=600), options(4, 40, 600) | {"alignment": 560})

    def test_bottom_right_by_own_lengths(self):
        q, k, v = qkv()
        got = sdpa.scaled_dot_product_attention(q, k, v, is_causal=True, alignment="bottom-right", kv_lens=[11, 8])
        for sequence, keys in enumerate([11, 8]):
            own = oracle.attend(*(x[sequence, :, :keys] for x in (q, k, v)), is_causal=True, alignment="bottom-right")
            self.assert_close(got[sequence], own[0])

    def test_causal_is_top_left_as_in_torch(self):
        for rows, keys in [(3, 5), (5, 3)]:
            q, k, v = qkv(rows=rows, keys=keys)
            got = sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)
            mask = np.tril(np.ones((rows, keys), dtype=bool))
            self.assert_bits(got, sdpa.scaled_dot_product_attention(q, k, v, mask))

    def test_open_windows(self):
        for window in [(None, None), (2, None), (None, 1), (0, 0)]:
            self.check(qkv(rows=9, keys=9), {"window": window})

    def test_grouped_heads(self):
        q, k, v = qkv(heads=6, kv_heads=2)
        got = sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        self.assert_close(got, oracle.attend(q, k, v)[0])
        repeated = [np.repeat(x, 3, axis=1) for x in (k, v)]
        self.assert_bits(got, sdpa.scaled_dot_product_attention(q, *repeated))
        mask = np.random.default_rng(4).random((2, 2, 7, 11)) < 0.6  # A head for each of keys and values.
        got = sdpa.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        self.assert_close(got, oracle.attend(q, k, v, np.repeat(mask, 3, axis=1))[0])

    def test_masks_of_every_shape(self):
        arrays = qkv()
        whole = np.random.default_rng(4).random((2, 4, 7, 11)) < 0.6
        for kept in itertools.product([False, True], repeat=4):
            mask = whole[tuple(slice(None) if keep else slice(1) for keep in kept)]
            for n in range(4 - next((n for n in range(4) if kept[n]), 4), 5):
                own = mask.reshape(mask.shape[4 - n :])
                self.check(arrays, {"attn_mask": own})
                self.check(arrays, {"attn_mask": np.where(own, random(*own.shape, seed=7), -INFINITY)})

    def test_mask_of_bool_beside_bias(self):
        arrays, values = qkv(), options(4, 7, 11)
        self.check(arrays, {"attn_mask": values["attn_mask"], "bias": values["bias"]})

    def test_bytes_that_are_not_0_count_as_true(self):
        q, k, v = qkv()
        mask = np.random.default_rng(4).integers(0, 3, (7, 11), dtype=np.uint8)
        got = sdpa.scaled_dot_product_attention(q, k, v, mask.view(bool))
        self.assert_bits(got, sdpa.scaled_dot_product_attention(q, k, v, mask != 0))

    def test_values_of_another_length(self):
        self.check(qkv(value_dim=5), {})

    def test_hidden_memory_has_no_effect(self):
        q, k, v = qkv(rows=20, keys=300)
        mask = np.random.default_rng(4).random(300) < 0.5
        given = {"attn_mask": mask, "bias": random(20, 300, seed=5), "kv_lens": [290, 270]}
        expected = sdpa.scaled_dot_product_attention(q, k, v, **given)
        for x in (k, v, np.broadcast_to(given["bias"], (2, 20, 300))):
            self.assertFalse(np.isnan(x).any())
        hidden = ~mask | (np.arange(300) >= 290)
        k[:, :, hidden], v[:, :, hidden], given["bias"][:, hidden] = np.nan, INFINITY, np.nan
        k[1, :, 270:], v[1, :, 270:] = np.nan, np.nan
        self.assert_bits(sdpa.scaled_dot_product_attention(q, k, v, **given), expected)

    def test_dropout(self):
        q, k, v = qkv(rows=50, keys=80)
        drop = lambda **seed: sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.25, **seed)
        self.assert_bits(drop(dropout_seed=2**64 - 1), drop(dropout_seed=2**64 - 1))
        self.assertFalse((drop(dropout_seed=1) == drop(dropout_seed=2)).all())
        plain = sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
        means = np.mean([drop(dropout_seed=seed) for seed in range(300)], axis=0)
        self.assertLess(abs(means - plain).max(), 0.2)
        # Of equal keys and values of 1 an output is the share of kept weights times 4/3.
        ones = [np.ones_like(x) for x in (q, k, v)]
        shares = sdpa.scaled_dot_product_attention(*ones, dropout_p=0.25, dropout_seed=3)[..., 0] * 0.75 * 80
        np.testing.assert_allclose(shares, np.round(shares), atol=1e-3)
        self.assertAlmostEqual(shares.mean() / 80, 0.75, delta=0.03)

    def test_slopes_of_the_paper(self):
        self.assertEqual(sdpa.alibi_slopes(8), [2.0**-n for n in range(1, 9)])


class Explanations(TestCase):
    def test_same_arguments(self):
        q, k, v = qkv(rows=300, keys=300)
        text = sdpa.explain(q, k, v, None, 0.0, True, threads=1, isa="portable", return_lse=True)
        self.assertIn("2 × 4 heads (4 key/value), 300 rows × 300 keys, 16 → 16", text)
        self.assertIn("portable, tiles of", text)
        self.assertIn("on 1 thread(s)", text)

    def test_nothing_is_computed(self):
        q, k, v = qkv()
        out = np.full_like(q, 7)
        sdpa.explain(q, k, v, out=out)
        self.assertTrue((out == 7).all())

    def test_refusals_are_those_of_the_call(self):
        q, k, v = qkv()
        self.refuses(ValueError, "softcap: 0, but must be positive and finite", sdpa.explain, q, k, v, softcap=0.0)
        self.refuses(TypeError, "got an unexpected keyword argument 'soft'", sdpa.explain, q, k, v, soft=1.0)


if __name__ == "__main__":
    unittest.main()
