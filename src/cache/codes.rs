//! Caches of other engines, in numbers of eight bits (OCP FP8 E4M3).

use crate::cache::{KvCache, check_tokens};
use crate::error::{Error, same};
use crate::shape::KvShape;
use sdpa_kernels::{Bf16, CacheFormat, KvFormat, View, e4m3, has_memory};

/// Bfloat16 with the position, at the end of a latent token.
const ROTARY: usize = 64;

impl KvCache {
    /// Appends tokens whose keys `[1, kv_heads, n, head_dim]` and values `[1, kv_heads, n, value_dim]` are E4M3 codes with the scales
    /// of this cache, [`CacheFormat::E4m3PerHead`], as vLLM stores them (`fp8_e4m3`, with a layer's `k_scale` and `v_scale`). They are
    /// stored as they are, NaN as NaN. Takes memory for the widened tokens meanwhile.
    ///
    /// Scores are sums of products with the codes, times the scale of the key: with scales of 1, the bits of a cache of the widened
    /// numbers ([`widen_e4m3`](crate::widen_e4m3)).
    ///
    /// ```
    /// use sdpa::{CacheFormat, KvCache, KvFormat, KvShape, View};
    /// let (k_scale, v_scale) = ([0.5; 2], [0.25; 2]); // of a layer, for two heads
    /// let format = KvFormat::new(CacheFormat::E4m3PerHead(&k_scale), CacheFormat::E4m3PerHead(&v_scale));
    /// let shape = KvShape { kv_heads: 2, head_dim: 4, value_dim: 4 };
    /// let mut cache = KvCache::new(1, shape)?.with_format(format)?;
    /// let codes = [0x38; 2 * 3 * 4]; // 1.0
    /// let codes = View::bhld(&codes, [1, 2, 3, 4])?;
    /// cache.append_codes(0, codes, codes)?;
    /// # let none = View::<f32>::bhld(&[], [1, 0, 0, 4])?;
    /// # let stored = sdpa::Inputs::cached(none, &cache).key_values()?;
    /// # assert_eq!([stored.key([0, 1, 2, 3]), stored.value([0, 1, 2, 3])], [Some(0.5), Some(0.25)]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Needs`] unless keys and values have this format; otherwise as [`Self::append_to`].
    pub fn append_codes(&mut self, sequence: usize, k: View<'_, u8>, v: View<'_, u8>) -> Result<(), Error> {
        self.check_one(sequence, k.shape()[0])?;
        let [keys, values] = widened_codes(self.format(), (self.shape(), "the cache"), [k, v])?;
        self.append_to(sequence, View::bhld(&keys, k.shape())?, View::bhld(&values, v.shape())?)
    }
}

/// Widens codes of keys and values, of a format that has scales of heads; sizes are those of `of`.
pub(crate) fn widened_codes(
    format: KvFormat<'_>,
    (shape, of): (KvShape, &'static str),
    [k, v]: [View<'_, u8>; 2],
) -> Result<[Vec<f32>; 2], Error> {
    let (CacheFormat::E4m3PerHead(of_keys), CacheFormat::E4m3PerHead(of_values)) = (format.keys, format.values) else {
        return Err(Error::Needs { argument: "format", needs: "E4m3PerHead, for keys and values" });
    };
    check_tokens(shape, of, [k.shape(), v.shape()])?;
    Ok([widened(k, of_keys)?, widened(v, of_values)?])
}

/// Widens codes, each times the scale of its head.
fn widened(codes: View<'_, u8>, scales: &[f32]) -> Result<Vec<f32>, Error> {
    let [batch, heads, rows, dim] = codes.shape();
    let n = sdpa_kernels::floats(codes.shape()).ok_or(Error::TooLarge { what: "codes", sizes: codes.shape() })?;
    let mut all = Vec::new();
    if !has_memory(n) || all.try_reserve_exact(n).is_err() {
        return Err(Error::Memory { what: "codes", bytes: n.saturating_mul(size_of::<f32>()) });
    }
    for (b, h, l) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..rows).map(move |l| (b, h, l)))) {
        let code = |d| codes.get([b, h, l, d]).copied().unwrap_or(0);
        all.extend((0..dim).map(|d| e4m3(code(d)).to_f32() * scales[h]));
    }
    Ok(all)
}

/// Widens latent keys of 656 bytes each, as SGLang and FlashMLA store them for DeepSeek's models up to V3.2, to rows of 576: 512
/// E4M3 codes, four `f32` scales of 128 codes each, and 64 bfloat16 with the position, all little-endian. The rows are tokens of
/// a latent cache ([`KvCache::latent`]), of any of its formats.
///
/// ```
/// use sdpa::{KvCache, KvShape, View, widen_latent_e4m3};
/// let tokens = vec![0x38; 2 * 656]; // two tokens of some pool
/// let mut rows = vec![0.0; 2 * 576];
/// widen_latent_e4m3(&tokens, &mut rows)?;
/// let mut cache = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 576, value_dim: 512 })?.latent()?;
/// let k = View::bhld(&rows, [1, 1, 2, 576])?;
/// cache.append(k, k.columns(0..512).unwrap())?;
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// [`Error::Mismatch`] if there are not 656 bytes for each row of 576.
pub fn widen_latent_e4m3(tokens: &[u8], rows: &mut [f32]) -> Result<(), Error> {
    const CODES: usize = 512;
    const GROUP: usize = 128;
    const TOKEN: usize = CODES + CODES / GROUP * size_of::<f32>() + ROTARY * size_of::<u16>();
    let row = CODES + ROTARY;
    same("tokens", "length", tokens.len(), rows.len() / row * TOKEN, "the rows (656 bytes for 576 elements)")?;
    same("rows", "length", rows.len(), tokens.len() / TOKEN * row, "the tokens (576 elements for 656 bytes)")?;
    for (token, row) in tokens.chunks_exact(TOKEN).zip(rows.chunks_exact_mut(row)) {
        let (codes, rest) = token.split_at(CODES);
        let (scales, rotary) = rest.split_at(CODES / GROUP * size_of::<f32>());
        let scales = scales.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
        widen_token(row, codes.chunks_exact(GROUP).zip(scales), rotary);
    }
    Ok(())
}

/// Widens a page of latent keys, as SGLang, vLLM and FlashMLA store them for DeepSeek V4, to rows of 512. Each token has 448 E4M3
/// codes and 64 little-endian bfloat16 with the position. Behind all tokens of the page, each has seven scales of 64 codes, E8M0
/// powers of two (OCP microscaling formats specification 1.0: byte 0 is 2⁻¹²⁷, byte 255 NaN), and a byte that does not count. The
/// rows are tokens of a latent cache ([`KvCache::latent`]).
///
/// Pages are longer where they are padded: give the first 584 bytes for each token that a page has room for. Scales lie
/// behind that room, filled or not. Products beyond `f32` are infinite.
///
/// ```
/// use sdpa::{KvCache, KvShape, View, widen_latent_page};
/// let page = vec![0x38; 64 * 584]; // room for 64 tokens; 10 are there
/// let mut rows = vec![0.0; 64 * 512];
/// widen_latent_page(&page, &mut rows)?;
/// let mut cache = KvCache::new(1, KvShape { kv_heads: 1, head_dim: 512, value_dim: 512 })?.latent()?;
/// let k = View::bhld(&rows[..10 * 512], [1, 1, 10, 512])?;
/// cache.append(k, k)?;
/// # Ok::<(), sdpa::Error>(())
/// ```
///
/// # Errors
/// [`Error::Mismatch`] if there are not 584 bytes for each row of 512.
pub fn widen_latent_page(page: &[u8], rows: &mut [f32]) -> Result<(), Error> {
    const CODES: usize = 448;
    const GROUP: usize = 64;
    const NUMBERS: usize = CODES + ROTARY * size_of::<u16>();
    const SCALES: usize = CODES / GROUP + 1;
    let row = CODES + ROTARY;
    let n = rows.len() / row;
    same("page", "length", page.len(), n * (NUMBERS + SCALES), "the rows (584 bytes for 512 elements)")?;
    same("rows", "length", rows.len(), n * row, "the page (512 elements for 584 bytes)")?;
    let (numbers, scales) = page.split_at(n * NUMBERS);
    let tokens = numbers.chunks_exact(NUMBERS).zip(scales.chunks_exact(SCALES));
    for ((token, scales), row) in tokens.zip(rows.chunks_exact_mut(row)) {
        let (codes, rotary) = token.split_at(CODES);
        widen_token(row, codes.chunks_exact(GROUP).zip(scales.iter().map(|&code| e8m0(code))), rotary);
    }
    Ok(())
}

/// Widens a token: groups of codes, each with its scale, then bfloat16.
fn widen_token<'a>(row: &mut [f32], groups: impl Iterator<Item = (&'a [u8], f32)>, rotary: &[u8]) {
    let (latent, end) = row.split_at_mut(row.len() - ROTARY);
    let codes = groups.flat_map(|(codes, scale)| codes.iter().map(move |&code| e4m3(code).to_f32() * scale));
    latent.iter_mut().zip(codes).for_each(|(x, widened)| *x = widened);
    for (x, &bytes) in end.iter_mut().zip(rotary.as_chunks().0) {
        *x = Bf16(u16::from_le_bytes(bytes)).to_f32();
    }
}

/// Returns the power of two of an E8M0 code.
fn e8m0(code: u8) -> f32 {
    match code {
        0 => f32::MIN_POSITIVE / 2.0, // 2⁻¹²⁷
        255 => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}
