//! Caches from their files.

use super::description::{Description, ElementFormat, StoredSequence, VERSION, Version, held};
use super::{
    CHANNEL_SCALES, DESCRIPTION, MAX_KEYS, format_of, swap_order, tensor_dtype, tensor_name, tensor_shape, too_long,
};
use crate::cache::KvCache;
use crate::error::Error;
use crate::shape::KvShape;
use crate::tensor_file::{TensorFile, parsed, wrong};
use safetensors::tensor::Dtype;
use sdpa_kernels::{F16, TokenPart, is_e4m3_scale, is_int8_scale};

impl<'a> TensorFile<'a> {
    pub(crate) fn description(&self) -> Result<Description, Error> {
        let text = self.description_text(DESCRIPTION)?;
        self.check_version(parsed(DESCRIPTION, text)?)?;
        parsed(DESCRIPTION, text)
    }

    /// Returns the descriptions of the caches of all layers, under this key.
    pub(crate) fn descriptions(&self, key: &str) -> Result<Vec<Description>, Error> {
        let text = self.description_text(key)?;
        parsed::<Vec<Version>>(key, text)?.into_iter().try_for_each(|version| self.check_version(version))?;
        parsed(key, text)
    }

    /// Returns the text under the key of a description.
    fn description_text(&self, key: &str) -> Result<&str, Error> {
        let none = || wrong(format!("the file does not describe a cache: there are no metadata {key:?}"));
        self.metadata(key).ok_or_else(none)
    }

    fn check_version(&self, Version { version }: Version) -> Result<(), Error> {
        match version {
            1..=VERSION => Ok(()),
            _ => Err(wrong(format!("the file's version is {version}, but must be 1 or {VERSION}"))),
        }
    }

    /// Returns the scales of the keys' channels.
    pub(crate) fn channel_scales(&self, prefix: &str, shape: KvShape) -> Result<Vec<f32>, Error> {
        let name = format!("{prefix}{CHANNEL_SCALES}");
        let scales = self.tensor_of(&name, Dtype::F32, &[shape.kv_heads, shape.head_dim])?;
        Ok(scales.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect())
    }

    /// Returns the tensors of a sequence, checked; `each` is the number of elements of a part of a token, and their size.
    pub(crate) fn sequence(
        &self,
        prefix: &str,
        description: &Description,
        sequence: usize,
        each: impl Fn(TokenPart) -> [usize; 2],
    ) -> Result<SequenceTensors<'a>, Error> {
        let &Description { kv_heads: heads, ref sequences, .. } = description;
        let formats = description.formats();
        let contents = sequences[sequence].unwrap_or(StoredSequence { len: 0, evicted: None });
        if contents.len > MAX_KEYS {
            return Err(wrong(too_long(sequence, contents.len)));
        }
        let mut tensors = Vec::new();
        for part in TokenPart::ALL {
            let [row, size] = each(part);
            if row > 0 && contents.len > 0 {
                let name = tensor_name(prefix, sequence, part);
                let held = held(contents, part, description.exact_first).count();
                let shape = tensor_shape(part, [heads, held, row], formats);
                let bytes = self.tensor_of(&name, tensor_dtype(part, formats), &shape)?;
                check_integers(&name, part, bytes, format_of(part, formats))?;
                check_head_scales(&name, bytes, description.head_scales(part))?;
                tensors.push((part, [row, size], bytes));
            }
        }
        Ok(SequenceTensors { heads, contents, exact: description.exact_first, tensors })
    }

    /// Returns the bytes of a tensor of this type and shape.
    fn tensor_of(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&'a [u8], Error> {
        let (tensor, bytes) = self.tensor(name)?;
        if tensor.dtype != dtype || tensor.shape != shape {
            let (was, is) = (tensor.dtype, &tensor.shape);
            return Err(wrong(format!("{name}: {was} {is:?}, but by the description must be {dtype} {shape:?}")));
        }
        Ok(bytes)
    }
}

/// Tensors of a sequence, each with the number of elements of a token in one head, and their size.
pub(crate) struct SequenceTensors<'a> {
    heads: usize,
    contents: StoredSequence,
    /// Number of first tokens that are exact.
    exact: usize,
    tensors: Vec<(TokenPart, [usize; 2], &'a [u8])>,
}

impl SequenceTensors<'_> {
    /// Calls `write` with each part of each token, `[head, token]`, in the machine's byte order.
    pub(crate) fn for_each_token(&self, mut write: impl FnMut(TokenPart, [usize; 2], &[u8])) {
        let mut own = Vec::new();
        for &(part, [row, size], bytes) in &self.tensors {
            let held = held(self.contents, part, self.exact);
            let places = (0..self.heads).flat_map(|head| held.clone().map(move |token| [head, token]));
            for (bytes, at) in bytes.chunks_exact(row * size).zip(places) {
                own.clear();
                own.extend_from_slice(bytes);
                swap_order(&mut own, size);
                write(part, at, &own);
            }
        }
    }
}

impl KvCache {
    /// Makes a cache from the bytes of a file that [`Self::export`] made, read or memory-mapped. It gives the bits of
    /// the exported cache in every call, on every machine. Takes the feature `safetensors`.
    ///
    /// Everything in the file is checked. Memory is allocated only for tokens that are in the file, in blocks as in any
    /// [`KvCache`].
    ///
    /// # Errors
    /// [`Error::File`], with the reason, for anything but such a file; [`Error::Memory`]; for sizes that no cache can
    /// have, the errors of [`Self::new`], [`Self::latent`], [`Self::int8`] and [`Self::int4`].
    pub fn import(bytes: &[u8]) -> Result<Self, Error> {
        let file = TensorFile::read(bytes)?;
        Self::from_file(&file, "", &file.description()?)
    }

    /// Makes the cache that a file describes; names of its tensors begin with this prefix.
    pub(crate) fn from_file(file: &TensorFile<'_>, prefix: &str, description: &Description) -> Result<Self, Error> {
        let mut cache = empty(file, prefix, description)?;
        for (sequence, contents) in description.sequences.iter().enumerate() {
            match contents {
                Some(contents) => {
                    check_contents(&cache, sequence, contents)?;
                    let tensors =
                        file.sequence(prefix, description, sequence, |part| cache.cache.token_elements(part))?;
                    cache.restore_sequence(sequence, &tensors)?;
                }
                None => _ = cache.removed.insert(sequence),
            }
        }
        Ok(cache)
    }

    /// Fills an empty sequence with tensors that were checked for it.
    pub(crate) fn restore_sequence(&mut self, sequence: usize, tensors: &SequenceTensors<'_>) -> Result<(), Error> {
        let StoredSequence { len, evicted } = tensors.contents;
        let [start, end] = evicted.unwrap_or([0, 0]);
        // The file has all the tokens that memory is taken for.
        if len > 0 && !self.cache.try_restore(sequence, len, start..end) {
            return Err(self.no_memory(len - (end - start)));
        }
        tensors
            .for_each_token(|part, [head, token], bytes| self.cache.write_token(part, [sequence, head, token], bytes));
        Ok(())
    }
}

/// Makes a cache as described, without keys.
fn empty(file: &TensorFile<'_>, prefix: &str, description: &Description) -> Result<KvCache, Error> {
    let &Description { kv_heads, head_dim, value_dim, latent, window, ref sequences, .. } = description;
    if kv_heads == 0 {
        return Err(Error::Empty { argument: "cache", what: "kv_heads" });
    }
    let (sequences, shape) = (sequences.len(), KvShape { kv_heads, head_dim, value_dim });
    let cache = match window {
        Some(keys) => KvCache::sliding(sequences, shape, keys.last, keys.first)?.rollback_room(keys.rollback)?,
        None => KvCache::new(sequences, shape)?,
    };
    let cache = if latent { cache.latent()? } else { cache };
    let scales = if description.has_channel_scales() { file.channel_scales(prefix, shape)? } else { Vec::new() };
    cache.with_empty_format(description.format(&scales))
}

/// Refuses lengths and gaps that no sequence of the cache has.
pub(super) fn check_contents(
    cache: &KvCache,
    sequence: usize,
    &StoredSequence { len, evicted }: &StoredSequence,
) -> Result<(), Error> {
    let evicted = evicted.map_or(0..0, |[start, end]| start..end);
    if !cache.cache.could_have(len, &evicted) {
        return Err(wrong(format!(
            "sequence {sequence}: no cache with this window has {len} keys without {evicted:?}"
        )));
    }
    Ok(())
}

/// Refuses elements and scales that no int8 or int4 cache has, and exact elements that are not finite.
fn check_integers(name: &str, part: TokenPart, bytes: &[u8], elements: ElementFormat) -> Result<(), Error> {
    if part.is_exact() {
        let mut all = bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x));
        return match all.find(|x| !x.is_finite()) {
            Some(bad) => Err(wrong(format!("{name}: an element is {bad}, but must be finite"))),
            None => Ok(()),
        };
    }
    if let ElementFormat::Int4 | ElementFormat::Int4Centred = elements {
        return check_int4(name, part, bytes, elements);
    }
    let int8 = matches!(elements, ElementFormat::Int8PerToken | ElementFormat::Int8PerChannel);
    match part {
        TokenPart::Key | TokenPart::Value if int8 && bytes.contains(&i8::MIN.cast_unsigned()) => {
            Err(wrong(format!("{name}: an element is -128, but must be at least -127")))
        }
        TokenPart::KeyScale | TokenPart::ValueScale => {
            let codes = matches!(elements, ElementFormat::E4m3PerToken | ElementFormat::E4m3PerHead);
            let (fits, of): (fn(f32) -> bool, _) =
                if codes { (is_e4m3_scale, "codes") } else { (is_int8_scale, "int8 rows") };
            let mut scales = bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x));
            match scales.find(|&scale| !fits(scale)) {
                Some(bad) => Err(wrong(format!("{name}: a scale is {bad}, but must be one that {of} have"))),
                None => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

/// Refuses scales of rows that are not those of their heads, if there are such: `held` rows each.
fn check_head_scales(name: &str, bytes: &[u8], heads: &[f32]) -> Result<(), Error> {
    let rows = bytes.len() / size_of::<f32>() / heads.len().max(1);
    let scales = heads.iter().flat_map(|&scale| core::iter::repeat_n(scale, rows));
    let mut pairs = bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).zip(scales);
    match pairs.find(|(got, scale)| got != scale) {
        Some((bad, scale)) => Err(wrong(format!("{name}: a scale is {bad}, but that of its head is {scale}"))),
        None => Ok(()),
    }
}

/// Refuses elements and numbers that no int4 cache has.
fn check_int4(name: &str, part: TokenPart, bytes: &[u8], elements: ElementFormat) -> Result<(), Error> {
    match part {
        TokenPart::Key | TokenPart::Value => match bytes.iter().find(|&&byte| byte & 0x0F == 8 || byte >> 4 == 8) {
            Some(_) => Err(wrong(format!("{name}: an element is -8, but must be at least -7"))),
            None => Ok(()),
        },
        TokenPart::KeyScale | TokenPart::ValueScale => {
            let numbers = bytes.as_chunks().0.iter().map(|&x| F16(u16::from_le_bytes(x)).to_f32());
            let each = if elements == ElementFormat::Int4 { 1 } else { 2 };
            match numbers.enumerate().find(|&(i, x)| !x.is_finite() || i % each == 0 && x < 0.0) {
                Some((i, bad)) if i % each == 0 => {
                    Err(wrong(format!("{name}: a scale is {bad}, but must be finite and not negative")))
                }
                Some((_, bad)) => Err(wrong(format!("{name}: a centre is {bad}, but must be finite"))),
                None => Ok(()),
            }
        }
        TokenPart::ExactKey | TokenPart::ExactValue => Ok(()),
    }
}
