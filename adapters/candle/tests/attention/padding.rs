//! Padded batches: tokenizers' masks, and where rows stand beside lengths.

use crate::oracle::{Scores, assert_close, assert_same, candle, mask, random};
use candle_core::{DType, Device, Tensor, Var};
use sdpa_candle::{Alignment, Attention, KvCache, KvShape, Sdpa, Window, alibi_slopes};

const BATCH: usize = 5;
const KEYS: usize = 9;
const INTEGERS: [DType; 5] = [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64];

/// Texts padded on the right, on the left, between tokens, not at all, and of padding alone.
const TOKENS: [[i64; KEYS]; BATCH] =
    [[1, 1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1, 0, 1, 0], [1; KEYS], [0; KEYS]];

/// Texts padded on the right alone, which become lengths.
const RIGHT: [[i64; KEYS]; BATCH] =
    [[1, 1, 1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0, 0], [1; KEYS], [1, 1, 1, 1, 1, 1, 1, 1, 0], [0; KEYS]];

fn tensor(tokens: &[[i64; KEYS]; BATCH]) -> Tensor {
    Tensor::new(tokens, &Device::Cpu).unwrap()
}

/// The mask as one for all heads and rows of a sequence.
fn keep(tokens: &Tensor) -> Tensor {
    tokens.ne(0i64).unwrap().reshape((BATCH, 1, 1, KEYS)).unwrap()
}

fn qkv(rows: usize) -> [Tensor; 3] {
    [random((BATCH, 4, rows, 16), 1), random((BATCH, 2, KEYS, 16), 2), random((BATCH, 2, KEYS, 12), 3)]
}

/// Keys or values with NaN in padding.
fn poisoned(x: &Tensor, tokens: &Tensor) -> Tensor {
    let nan = Tensor::full(f32::NAN, x.shape(), &Device::Cpu).unwrap();
    let real = tokens.ne(0i64).unwrap().reshape((BATCH, 1, KEYS, 1)).unwrap();
    real.broadcast_as(x.shape()).unwrap().where_cond(x, &nan).unwrap()
}

/// Sequences that have a token, of an output.
fn with_tokens(out: &Tensor) -> Tensor {
    out.narrow(0, 0, BATCH - 1).unwrap()
}

#[test]
fn any_integers_are_padding() {
    let [q, k, v] = qkv(KEYS);
    for tokens in [TOKENS, RIGHT] {
        let tokens = tensor(&tokens);
        let expected = candle(&q, &k, &v, &Scores::keep(keep(&tokens))).unwrap();
        let masked = Sdpa::default().keep_mask(&keep(&tokens)).forward(&q, &k, &v).unwrap();
        let (k, v) = (poisoned(&k, &tokens), poisoned(&v, &tokens));
        for dtype in INTEGERS {
            let out = Sdpa::default().padding(&tokens.to_dtype(dtype).unwrap()).forward(&q, &k, &v).unwrap();
            assert_same(&out, &masked, &format!("{dtype:?}: as a mask"));
            assert_close(&with_tokens(&out), &with_tokens(&expected), 1e-5, &format!("{dtype:?}: as candle"));
            let nothing = out.narrow(0, BATCH - 1, 1).unwrap();
            assert_same(&nothing, &nothing.zeros_like().unwrap(), "padding alone");
        }
        // Any number but 0 is a token, and any strides are read.
        let numbers = (&tokens * -3.0).unwrap().t().unwrap().contiguous().unwrap().t().unwrap();
        let out = Sdpa::default().padding(&numbers).forward(&q, &k, &v).unwrap();
        assert_same(&out, &masked, "other numbers, transposed");
    }
}

/// A mask of as many texts as tokens could be one of rows and keys: `padding` never reads it so, and a mask is refused.
#[test]
fn eight_texts_of_eight_tokens() {
    let [q, k, v] = [1, 2, 3].map(|seed| random((8, 2, 8, 16), seed));
    let tokens: Vec<u8> = (0..64).map(|n| u8::from(n % 8 <= n / 8)).collect();
    let tokens = Tensor::from_vec(tokens, (8, 8), &Device::Cpu).unwrap();
    let out = Sdpa::default().padding(&tokens).forward(&q, &k, &v).unwrap();
    let call = |shape: [usize; 4]| {
        Sdpa::default().keep_mask(&tokens.reshape(&shape[..]).unwrap()).forward(&q, &k, &v).unwrap()
    };
    assert_same(&out, &call([8, 1, 1, 8]), "as padding");
    let difference = (out - call([1, 1, 8, 8])).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    assert!(difference > 0.1, "as rows and keys the answer is another: {difference}");
    for sdpa in [Sdpa::default().keep_mask(&tokens), Sdpa::default().drop_mask(&tokens)] {
        let said = sdpa.forward(&q, &k, &v).unwrap_err().to_string();
        assert!(said.starts_with("sdpa: mask: shape is [8, 8], and the batch is 8: reshape to [8, 1, 1, 8]"), "{said}");
    }
}

/// Lengths or a mask: rows stand at the columns of the keys either way.
#[test]
fn rows_stand_where_they_lie() {
    let slopes = Tensor::new(&alibi_slopes(4)[..], &Device::Cpu).unwrap();
    let settings = [
        Attention::new().causal(),
        Attention::new().window(Window::inclusive(Some(2), Some(1))),
        Attention::new().causal().window(Window::inclusive(Some(3), None)),
        Attention::new(),
    ];
    let alignments = [None, Some(Alignment::TopLeft), Some(Alignment::BottomRight), Some(Alignment::Offset(2))];
    for rows in [KEYS, 4, 1] {
        let [q, k, v] = qkv(rows);
        for tokens in [TOKENS, RIGHT] {
            let tokens = tensor(&tokens);
            for (attention, alignment) in settings.iter().flat_map(|a| alignments.map(|alignment| (a, alignment))) {
                // Slopes need an alignment too.
                if alignment.is_none() && rows != KEYS {
                    continue;
                }
                let attention = alignment.map_or(*attention, |alignment| attention.align(alignment));
                let call = Sdpa::new(attention).alibi(&slopes);
                let expected = call.clone().keep_mask(&keep(&tokens)).forward(&q, &k, &v).unwrap();
                let out = call.padding(&tokens).forward(&q, &poisoned(&k, &tokens), &poisoned(&v, &tokens)).unwrap();
                assert_same(&out, &expected, &format!("{rows} rows, {attention:?}, {:?}", tokens.to_vec2::<i64>()));
            }
        }
    }
}

#[test]
fn causal_texts_padded_on_the_left() {
    let [q, k, v] = qkv(KEYS);
    let tokens = tensor(&TOKENS);
    let causal = mask(KEYS, KEYS, |row, key| key <= row).broadcast_mul(&keep(&tokens)).unwrap();
    let out = Sdpa::new(Attention::new().causal()).padding(&tokens).forward(&q, &k, &v).unwrap();
    let expected = candle(&q, &k, &v, &Scores::keep(causal)).unwrap();
    // Rows before the first token see nothing: 0 here, NaN in candle.
    for (sequence, tokens) in TOKENS.iter().enumerate() {
        let first = tokens.iter().position(|&token| token == 1).unwrap_or(KEYS);
        let rows = |x: &Tensor, from: usize, len: usize| {
            x.narrow(0, sequence, 1).unwrap().narrow(2, from, len).unwrap().contiguous().unwrap()
        };
        let what = format!("sequence {sequence}");
        assert_close(&rows(&out, first, KEYS - first), &rows(&expected, first, KEYS - first), 1e-5, &what);
        let before = rows(&out, 0, first);
        assert_same(&before, &before.zeros_like().unwrap(), &what);
    }
}

#[test]
fn padding_beside_masks_and_lengths() {
    let [q, k, v] = qkv(KEYS);
    let given = mask(KEYS, KEYS, |row, key| key == row || (row * 7 + key * 5) % 3 > 0);
    let lens = Tensor::new(&[9u32, 5, 3, 4, 9], &Device::Cpu).unwrap();
    let within = Tensor::new(&[9i64, 5, 3, 4, 9], &Device::Cpu).unwrap().reshape((BATCH, 1)).unwrap();
    let columns = Tensor::arange(0, KEYS as i64, &Device::Cpu).unwrap().reshape((1, KEYS)).unwrap();
    let within = columns.broadcast_lt(&within).unwrap().reshape((BATCH, 1, 1, KEYS)).unwrap();
    for tokens in [TOKENS, RIGHT] {
        let tokens = tensor(&tokens);
        let both = given.broadcast_mul(&keep(&tokens)).unwrap();
        let expected = Sdpa::default().keep_mask(&both).forward(&q, &k, &v).unwrap();
        let (k, v) = (poisoned(&k, &tokens), poisoned(&v, &tokens));
        let column = mask(KEYS, 1, |row, _| row != 4);
        let calls = [
            Sdpa::default().keep_mask(&given).padding(&tokens),
            Sdpa::default().padding(&tokens).drop_mask(&given.eq(0u8).unwrap()),
            Sdpa::default().padding(&tokens).keep_mask(&given.squeeze(0).unwrap().squeeze(0).unwrap()),
        ];
        for call in calls {
            assert_same(&call.forward(&q, &k, &v).unwrap(), &expected, &format!("{call:?}"));
        }
        let call = |keep: &Tensor| Sdpa::default().keep_mask(keep).forward(&q, &k, &v).unwrap();
        let expected = call(&keep(&tokens).broadcast_mul(&column).unwrap());
        let got = Sdpa::default().keep_mask(&column).padding(&tokens).forward(&q, &k, &v).unwrap();
        assert_same(&got, &expected, "one column");
        let expected = call(&keep(&tokens).broadcast_mul(&within).unwrap());
        let got = Sdpa::default().kv_lens(&lens).padding(&tokens).forward(&q, &k, &v).unwrap();
        assert_same(&got, &expected, "lengths");
    }
}

/// A decode step of a batch that was padded on the left.
#[test]
fn padding_over_a_cache() {
    let [q, k, v] = qkv(3);
    let mut cache = KvCache::new(BATCH, KvShape { kv_heads: 2, head_dim: 16, value_dim: 12 }).unwrap();
    cache.append(&k, &v).unwrap();
    for attention in [Attention::new(), Attention::new().causal().align(Alignment::BottomRight)] {
        for tokens in [TOKENS, RIGHT] {
            let call = Sdpa::new(attention).padding(&tensor(&tokens));
            let [got, expected] = [cache.attend(&q, &call), call.forward(&q, &k, &v)].map(Result::unwrap);
            assert_same(&got, &expected, &format!("{attention:?}"));
        }
    }
}

#[test]
fn gradients_beside_padding_are_candles() {
    for tokens in [TOKENS, RIGHT] {
        let tokens = tensor(&tokens).narrow(0, 0, BATCH - 1).unwrap();
        let keep = tokens.ne(0i64).unwrap().reshape((BATCH - 1, 1, 1, KEYS)).unwrap();
        let vars = qkv(KEYS).map(|x| Var::from_tensor(&x.narrow(0, 0, BATCH - 1).unwrap()).unwrap());
        let gradients = |out: Tensor| {
            let loss = (&out * random(out.shape().clone(), 9)).unwrap().sum_all().unwrap();
            let store = loss.backward().unwrap();
            vars.each_ref().map(|var| store.get(var).expect("a gradient").clone())
        };
        let [q, k, v] = vars.each_ref().map(|var| var.as_tensor());
        let got = gradients(Sdpa::default().padding(&tokens).forward(q, k, v).unwrap());
        let expected = gradients(candle(q, k, v, &Scores::keep(keep)).unwrap());
        for ((name, got), expected) in ["q", "k", "v"].into_iter().zip(&got).zip(&expected) {
            assert_close(got, expected, 1e-4, &format!("gradient in {name}"));
        }
    }
}

/// A window beside lengths: of as many rows as keys, row i is at key i of the shorter sequences too.
#[test]
fn windows_beside_lengths() {
    let [q, k, v] = qkv(KEYS);
    let lens = [9u32, 6, 8, 7, 9];
    let keep = Tensor::cat(&lens.map(|len| mask(1, KEYS, |_, key| key < len as usize)), 0).unwrap();
    let near = mask(KEYS, KEYS, |row, key| row <= key + 3 && key <= row + 3).broadcast_mul(&keep).unwrap();
    let lens = Tensor::new(&lens, &Device::Cpu).unwrap();
    let window = Attention::new().window(Window::inclusive(Some(3), Some(3)));
    let expected = candle(&q, &k, &v, &Scores::keep(near)).unwrap();
    let out = Sdpa::new(window).kv_lens(&lens).forward(&q, &k, &v).unwrap();
    assert_close(&out, &expected, 1e-5, "window");
    let top_left = Sdpa::new(window.align(Alignment::TopLeft)).kv_lens(&lens).forward(&q, &k, &v).unwrap();
    assert_same(&out, &top_left, "the alignment that is meant");
    // One that is given is kept: the last row at the last key of its own sequence.
    let keep = [9usize, 6, 8, 7, 9].map(|len| {
        mask(KEYS, KEYS, |row, key| key < len && (row + len).abs_diff(key + KEYS) <= 3 && row + len >= KEYS)
    });
    let out = Sdpa::new(window.align(Alignment::BottomRight)).kv_lens(&lens).forward(&q, &k, &v).unwrap();
    let expected = candle(&q, &k, &v, &Scores::keep(Tensor::cat(&keep, 0).unwrap())).unwrap();
    let last = |x: &Tensor| x.narrow(2, 3, KEYS - 3).unwrap().contiguous().unwrap();
    assert_close(&last(&out), &last(&expected), 1e-5, "bottom right");
}
