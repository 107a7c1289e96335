"""Attention in float64, step by step: what results should be."""

import numpy as np


def random(*shape, seed, dtype=np.float32):
    """Standard normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(batch=2, heads=4, kv_heads=4, rows=7, keys=11, dim=16, value_dim=16):
    """Queries, keys and values of one call."""
    return (
        random(batch, heads, rows, dim, seed=1),
        random(batch, kv_heads, keys, dim, seed=2),
        random(batch, kv_heads, keys, value_dim, seed=3),
    )


def positions(rows, keys, alignment):
    """Positions of the rows among the keys, as a column."""
    first = {"top-left": 0, "bottom-right": keys - rows, None: 0}.get(alignment, alignment)
    return np.arange(rows)[:, None] + first


def attend(
    query,
    key,
    value,
    attn_mask=None,
    is_causal=False,
    scale=None,
    *,
    softcap=None,
    bias=None,
    alibi=None,
    sinks=None,
    window=None,
    alignment=None,
    kv_lens=None,
):
    """Output and log-sum-exp of arrays [..., heads, rows, dim]; those of batch and heads [batch, heads] if there are lengths."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (query, key, value))
    k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v)) if q.ndim > 2 else (k, v)
    scores = (q @ np.swapaxes(k, -1, -2)) * (1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    rows, keys = scores.shape[-2:]
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    distance = positions(rows, keys, alignment) - np.arange(keys)
    scores = scores + (0 if bias is None else np.asarray(bias, dtype=np.float64))
    if alibi is not None:
        scores = scores - np.asarray(alibi, dtype=np.float64)[:, None, None] * abs(distance)
    seen = np.ones_like(scores, dtype=bool)
    if attn_mask is not None and attn_mask.dtype == bool:
        seen &= attn_mask
    elif attn_mask is not None:
        scores = scores + np.asarray(attn_mask, dtype=np.float64)
    if is_causal:
        seen &= distance >= 0
    if window is not None:
        left, right = window
        seen &= (distance <= (keys + rows if left is None else left)) & (-distance <= (keys + rows if right is None else right))
    if kv_lens is not None:
        seen &= np.arange(keys) < np.asarray(kv_lens)[:, None, None, None]
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(np.asarray(sinks, dtype=np.float64)[:, None, None], (*scores.shape[:-1], 1))
        scores, v = np.concatenate([scores, column], -1), np.concatenate([v, np.zeros_like(v[..., :1, :])], -2)
    return softmax(scores, v)


def softmax(scores, v):
    """Means of the values, weighted by the softmax of the scores, and its log-sum-exp; 0 and −∞ for rows of −∞ alone."""
    most = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(most), most, 0))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total)[..., 0] + np.where(np.isfinite(most), most, 0)[..., 0]
    hidden = weights == 0
    # Whatever a hidden value is, NaN too, it has no part in a mean.
    v = np.where(hidden.all(-2)[..., None], 0, v)
    return (weights / np.where(total == 0, 1, total)) @ v, lse


def ulp(dtype):
    """Distance of 1 from the next number of a type, by its name."""
    return {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[np.dtype(dtype).name]
