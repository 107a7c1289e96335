"""Scaled-dot-product attention for CPUs, softmax(scale · Q Kᵀ) V, in one fused pass over numpy's arrays."""

import inspect

import numpy  # rust-numpy needs it before the first array.

from sdpa import _sdpa

__all__ = ["alibi_slopes", "explain", "instruction_sets", "scaled_dot_product_attention"]
__version__ = _sdpa.VERSION

alibi_slopes = _sdpa.alibi_slopes
instruction_sets = _sdpa.instruction_sets


def scaled_dot_product_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    softcap=None,
    bias=None,
    alibi=None,
    sinks=None,
    window=None,
    alignment=None,
    kv_lens=None,
    dropout_seed=None,
    precision=None,
    uint16_as=None,
    out=None,
    return_lse=False,
    threads=None,
    isa=None,
):
    """Compute softmax(scale · query keyᵀ) value, with the arguments of torch's function of this name, and others by name.

    ``query`` is ``[..., heads, rows, head_dim]``, ``key`` ``[..., kv_heads, keys, head_dim]`` and ``value``
    ``[..., kv_heads, keys, value_dim]``, of float32, float16 or bfloat16 in any mix and any strides. Leading dimensions are
    broadcast; none, or one of heads alone, may be there. Nothing is copied. The output is ``[..., heads, rows, value_dim]``
    in the type of ``query``; sums are float32.

    attn_mask: of bool, True where a row may attend to a key; or of floats, added to the scaled scores. It is broadcast to
        ``[..., heads, rows, keys]``. Together with ``is_causal``, both must allow a key.
    dropout_p: probability that a weight is dropped, at least 0 and below 1; needs ``dropout_seed``.
    is_causal: row i sees keys 0 to i, as in torch; ``alignment="bottom-right"`` is what decoding wants.
    scale: factor of the scores, 1/√head_dim by default.
    enable_gqa: lets ``kv_heads`` be a divisor of ``heads``. Nothing is repeated in memory.
    softcap: c; a score s becomes c·tanh(s/c) before masks and biases.
    bias: floats added to the scores, beside a mask of bool.
    alibi: a slope for each query head: −slope·|distance| is added to a score.
    sinks: a logit for each query head, which counts as one more key of value 0.
    window: (left, right), how many keys before and behind its own position a row sees; None for all on that side.
    alignment: position of row 0 among the keys: "top-left" is key 0, "bottom-right" puts the last row at the last key, a
        number counts the keys before row 0. A window or slopes need it if there are more rows than keys, or fewer.
    kv_lens: number of valid keys of each sequence; keys beyond are never read into a result.
    dropout_seed: 0 to 2⁶⁴ − 1. Equal seeds drop the same weights.
    precision: "exact" by default. "native" and "accurate" may use the machine's own products of bfloat16: see the README.
    uint16_as: "bfloat16" if arrays of uint16 are the bits of bfloat16.
    out: array that gets the output, of float32, float16 or bfloat16 and any strides. It must share no element with an input.
    return_lse: returns the output and the log-sum-exp of each row, ``[..., heads, rows]`` of float32.
    threads: largest number of threads, of a pool with one for each core (or RAYON_NUM_THREADS). Results have the same bits
        for any number.
    isa: one of ``instruction_sets()``; the widest by default.

    Raises TypeError or ValueError, which name the argument; ``out`` is then untouched. The interpreter's lock is released
    meanwhile: other threads must not change the arrays.
    """
    return _sdpa.attention(locals())


_signature = inspect.signature(scaled_dot_product_attention)


def explain(*arguments, **options):
    """Return the plan of a call with these arguments, and the reasons for it, in words. Nothing is computed.

    The arguments are those of ``scaled_dot_product_attention``.
    """
    call = _signature.bind(*arguments, **options)
    call.apply_defaults()
    return _sdpa.explain(call.arguments)


explain.__signature__ = _signature
