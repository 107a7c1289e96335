//! Reads a safetensors file.

use crate::data::{Tensor, Tensors};
use crate::failure::{Refused, Result};
use crate::lists::Lists;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use sdpa::{Bf16, F16, SelectedKeys};
use std::path::Path;

/// Names shown of the tensors that a file does have.
const NAMES_SHOWN: usize = 8;

/// Reads `{prefix}q`, `{prefix}k`, `{prefix}v` and what else of attention's tensors there is.
pub(crate) fn load(path: &Path, prefix: &str, title: impl Fn(&[u8]) -> String) -> Result<Tensors> {
    let refuse = |why: &dyn std::fmt::Display| Refused::new(format_args!("{}: {why}", path.display()));
    // A directory or a device would give a puzzling message, or none ever.
    if !std::fs::metadata(path).map_err(|e| refuse(&e))?.is_file() {
        return Err(refuse(&"not a file"));
    }
    let bytes = std::fs::read(path).map_err(|e| refuse(&e))?;
    tensors(&bytes, prefix, title(&bytes)).map_err(|e| refuse(&e))
}

/// The tensors of a file in memory.
fn tensors(bytes: &[u8], prefix: &str, title: String) -> Result<Tensors> {
    let file =
        SafeTensors::deserialize(bytes).map_err(|e| Refused::new(format_args!("not a safetensors file: {e}")))?;
    let given = |name: &'static str| Named::find(&file, prefix, name);
    let needed = |name: &'static str| {
        given(name).ok_or_else(|| {
            let mut names = file.names();
            names.sort_unstable();
            let more = if names.len() > NAMES_SHOWN { ", …" } else { "" };
            let has = names.iter().take(NAMES_SHOWN).copied().collect::<Vec<_>>().join(", ");
            Refused::new(format_args!("no tensor {prefix}{name}; there are {}: {has}{more}", names.len()))
        })
    };
    let [q, k, v] = [needed("q")?, needed("k")?, needed("v")?];
    Ok(Tensors {
        title,
        dtype: type_of([&q, &k, &v])?,
        q: q.numbers()?,
        k: k.numbers()?,
        v: v.numbers()?,
        bias: given("bias").map(|bias| bias.floats()).transpose()?,
        mask: given("mask").map(|mask| mask.bytes()).transpose()?,
        sinks: given("sinks").map(|sinks| sinks.list("heads")).transpose()?,
        alibi_slopes: given("alibi_slopes").map(|slopes| slopes.list("heads")).transpose()?,
        kv_lens: given("kv_lens").map(|lens| lens.lengths()).transpose()?,
        selected: given("selected").map(|numbers| numbers.lists(given("selected_lens"))).transpose()?,
        d_out: given("d_out").map(|gradient| gradient.floats()).transpose()?,
        d_lse: given("d_lse").map(|gradient| gradient.numbers_of_rows()).transpose()?,
    })
}

/// The one element type of the first tensor and the others.
fn type_of([first, others @ ..]: [&Named<'_>; 3]) -> Result<sdpa::Dtype> {
    let dtype = first.element_type()?;
    for other in others {
        if other.element_type()? != dtype {
            let (name, theirs) = (&other.name, other.view.dtype());
            let (first, one) = (&first.name, first.view.dtype());
            return Err(Refused::new(format_args!(
                "{name}: dtype is {theirs:?}, but must be that of {first}, {one:?}"
            )));
        }
    }
    Ok(dtype)
}

/// A tensor of the file.
struct Named<'a> {
    name: String,
    view: TensorView<'a>,
}

impl<'a> Named<'a> {
    fn find(file: &SafeTensors<'a>, prefix: &str, name: &str) -> Option<Self> {
        let name = format!("{prefix}{name}");
        let view = file.tensor(&name).ok()?;
        Some(Self { name, view })
    }

    /// The type of elements that may be of 16 bits.
    fn element_type(&self) -> Result<sdpa::Dtype> {
        self.dtype(&[Dtype::F32, Dtype::BF16, Dtype::F16], "F32, BF16 or F16")?;
        Ok(match self.view.dtype() {
            Dtype::BF16 => sdpa::Dtype::Bf16,
            Dtype::F16 => sdpa::Dtype::F16,
            _ => sdpa::Dtype::F32,
        })
    }

    /// `[batch, heads, rows, dim]` of such elements, widened.
    fn numbers(&self) -> Result<Tensor> {
        let data = match self.element_type()? {
            sdpa::Dtype::Bf16 => each(self.view.data(), |x| Bf16(u16::from_le_bytes(x)).to_f32()),
            sdpa::Dtype::F16 => each(self.view.data(), |x| F16(u16::from_le_bytes(x)).to_f32()),
            _ => self.f32s(),
        };
        Ok(Tensor { shape: self.shape("batch, heads, rows, dim")?, data })
    }

    /// `[batch, heads, rows, dim]` of f32.
    fn floats(&self) -> Result<Tensor> {
        self.dtype(&[Dtype::F32], "F32")?;
        Ok(Tensor { shape: self.shape("batch, heads, rows, dim")?, data: self.f32s() })
    }

    /// `[batch, heads, rows, keys]` of bytes or booleans.
    fn bytes(&self) -> Result<Tensor<u8>> {
        self.dtype(&[Dtype::BOOL, Dtype::U8], "BOOL or U8")?;
        Ok(Tensor { shape: self.shape("batch, heads, rows, keys")?, data: self.view.data().to_vec() })
    }

    /// `[batch, heads, rows]` of f32.
    fn numbers_of_rows(&self) -> Result<Tensor> {
        self.dtype(&[Dtype::F32], "F32")?;
        let [batch, heads, rows] = self.shape("batch, heads, rows")?;
        Ok(Tensor { shape: [batch, heads, rows, 1], data: self.f32s() })
    }

    /// `[heads]` of f32.
    fn list(&self, of: &str) -> Result<Vec<f32>> {
        self.dtype(&[Dtype::F32], "F32")?;
        let [_] = self.shape(of)?;
        Ok(self.f32s())
    }

    /// `[batch, heads, groups, places]` of i32, and how many places count.
    fn lists(&self, lens: Option<Self>) -> Result<Lists> {
        self.dtype(&[Dtype::I32], "I32")?;
        let numbers = Tensor { shape: self.shape("batch, heads, groups, places")?, data: self.i32s() };
        let lens = lens.map(|lens| {
            lens.dtype(&[Dtype::I32], "I32")?;
            lens.shape("groups or sequences").map(|[_]| lens.i32s())
        });
        Ok(Lists { numbers, lens: lens.transpose()?, keys: SelectedKeys::new() })
    }

    /// `[batch]` of integers.
    fn lengths(&self) -> Result<Vec<usize>> {
        self.dtype(&[Dtype::I32, Dtype::I64, Dtype::U32, Dtype::U64], "I32, I64, U32 or U64")?;
        let [_] = self.shape("batch")?;
        let data = self.view.data();
        let numbers: Vec<i128> = match self.view.dtype() {
            Dtype::I32 => each(data, |x| i32::from_le_bytes(x).into()),
            Dtype::I64 => each(data, |x| i64::from_le_bytes(x).into()),
            Dtype::U32 => each(data, |x| u32::from_le_bytes(x).into()),
            _ => each(data, |x| u64::from_le_bytes(x).into()),
        };
        let length = |(i, n): (usize, i128)| {
            usize::try_from(n).map_err(|_| {
                let bound = if n < 0 { "at least 0".to_owned() } else { format!("at most {}", usize::MAX) };
                Refused::new(format_args!("{}: entry {i} is {n}, but must be {bound}", self.name))
            })
        };
        numbers.into_iter().enumerate().map(length).collect()
    }

    fn dtype(&self, good: &[Dtype], in_words: &str) -> Result<()> {
        match self.view.dtype() {
            dtype if good.contains(&dtype) => Ok(()),
            dtype => Err(Refused::new(format_args!("{}: dtype is {dtype:?}, but must be {in_words}", self.name))),
        }
    }

    fn shape<const N: usize>(&self, dimensions: &str) -> Result<[usize; N]> {
        self.view.shape().try_into().map_err(|_| {
            let (name, shape) = (&self.name, self.view.shape());
            let rank = shape.len();
            Refused::new(format_args!("{name}: shape {shape:?} has {rank} dimensions, but must have {N}: {dimensions}"))
        })
    }

    fn i32s(&self) -> Vec<i32> {
        each(self.view.data(), i32::from_le_bytes)
    }

    fn f32s(&self) -> Vec<f32> {
        each(self.view.data(), f32::from_le_bytes)
    }
}

fn each<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|&x| read(x)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    type Spec<'a> = (&'a str, Dtype, &'a [usize]);

    fn file_of(tensors: &[Spec<'_>], data: &[u8]) -> Vec<u8> {
        let views = tensors.iter().map(|&(name, dtype, shape)| {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (name, TensorView::new(dtype, shape.to_vec(), &data[..bytes]).unwrap())
        });
        safetensors::serialize(views.collect::<HashMap<_, _>>(), None).unwrap()
    }

    fn read(tensors: &[Spec<'_>]) -> Result<Tensors> {
        super::tensors(&file_of(tensors, &[0; 4096]), "", String::new())
    }

    fn refusal(tensors: &[Spec<'_>]) -> String {
        read(tensors).unwrap_err().to_string()
    }

    const Q: Spec<'_> = ("q", Dtype::F32, &[1, 1, 2, 4]);
    const K: Spec<'_> = ("k", Dtype::F32, &[1, 1, 2, 4]);
    const V: Spec<'_> = ("v", Dtype::F32, &[1, 1, 2, 4]);

    #[test]
    fn tensors_of_other_kinds_are_refused() {
        assert!(read(&[Q, K, V, ("expected.out", Dtype::F16, &[3])]).is_ok());
        assert_eq!(refusal(&[("q", Dtype::F64, Q.2), K, V]), "q: dtype is F64, but must be F32, BF16 or F16");
        assert_eq!(
            refusal(&[Q, ("k", Dtype::F32, &[1, 2, 4]), V]),
            "k: shape [1, 2, 4] has 3 dimensions, but must have 4: batch, heads, rows, dim"
        );
        assert_eq!(refusal(&[Q, K]), "no tensor v; there are 2: k, q");
        assert_eq!(refusal(&[]), "no tensor q; there are 0: ");
    }

    #[test]
    fn elements_of_16_bits_are_widened() {
        let bytes: Vec<u8> = [0x3fa0u16, 0xc000, 0x0001, 0x7c00].iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let numbers = |dtype| {
            let file = file_of(&["q", "k", "v"].map(|name| (name, dtype, &[1, 1, 2, 2][..])), &bytes);
            let Tensors { dtype, q, k, v, .. } = super::tensors(&file, "", String::new()).unwrap();
            assert_eq!(([1, 1, 2, 2], &q, &q), (q.shape, &k, &v));
            (dtype, q.data)
        };
        let bf16 = vec![1.25, -2.0, f32::from_bits(1 << 16), f32::from_bits(0x7c00 << 16)];
        assert_eq!(numbers(Dtype::BF16), (sdpa::Dtype::Bf16, bf16));
        let f16 = vec![1.90625, -2.0, f32::powi(0.5, 24), f32::INFINITY];
        assert_eq!(numbers(Dtype::F16), (sdpa::Dtype::F16, f16));
        assert_eq!(read(&[Q, K, V]).unwrap().dtype, sdpa::Dtype::F32);
    }

    #[test]
    fn queries_keys_and_values_are_of_one_type() {
        let typed = |(name, _, shape): Spec<'static>, dtype| (name, dtype, shape);
        let [q, k] = [Q, K].map(|spec| typed(spec, Dtype::BF16));
        assert_eq!(refusal(&[q, K, V]), "k: dtype is F32, but must be that of q, BF16");
        assert_eq!(refusal(&[Q, k, V]), "k: dtype is BF16, but must be that of q, F32");
        assert_eq!(refusal(&[q, k, typed(V, Dtype::F16)]), "v: dtype is F16, but must be that of q, BF16");
        assert_eq!(refusal(&[q, k, typed(V, Dtype::I16)]), "v: dtype is I16, but must be F32, BF16 or F16");
    }

    #[test]
    fn options_are_read() {
        let options = [("bias", Dtype::F32, Q.2), ("mask", Dtype::BOOL, Q.2), ("sinks", Dtype::F32, &[1][..])];
        let more = [("alibi_slopes", Dtype::F32, &[1][..]), ("kv_lens", Dtype::U32, &[1][..])];
        let tensors = read(&[&[Q, K, V][..], &options, &more].concat()).unwrap();
        assert_eq!((tensors.sinks, tensors.alibi_slopes), (Some(vec![0.0]), Some(vec![0.0])));
        assert_eq!(tensors.kv_lens, Some(vec![0]));
        assert_eq!(tensors.bias.unwrap().shape, [1, 1, 2, 4]);
        assert_eq!(tensors.mask.unwrap().data, [0; 8]);
        let lists = [("selected", Dtype::I32, &[1, 1, 2, 3][..]), ("selected_lens", Dtype::I32, &[2][..])];
        let lists = read(&[&[Q, K, V][..], &lists].concat()).unwrap().selected.unwrap();
        assert_eq!((lists.numbers.shape, lists.numbers.data), ([1, 1, 2, 3], vec![0; 6]));
        assert_eq!(lists.lens, Some(vec![0; 2]));
    }

    #[test]
    fn options_of_other_kinds_are_refused() {
        let message = |option: Spec<'_>| refusal(&[Q, K, V, option]);
        let mask = message(("mask", Dtype::F32, Q.2));
        assert_eq!(mask, "mask: dtype is F32, but must be BOOL or U8");
        let sinks = message(("sinks", Dtype::F32, &[1, 4]));
        assert_eq!(sinks, "sinks: shape [1, 4] has 2 dimensions, but must have 1: heads");
        let lens = message(("kv_lens", Dtype::F32, &[1]));
        assert_eq!(lens, "kv_lens: dtype is F32, but must be I32, I64, U32 or U64");
    }

    #[test]
    fn lengths_are_not_negative() {
        let lengths = |dtype: Dtype, bytes: &[u8]| {
            let len = 8 * bytes.len() / dtype.bitsize();
            let file = file_of(&[("kv_lens", dtype, &[len])], bytes);
            Named::find(&SafeTensors::deserialize(&file).unwrap(), "", "kv_lens").unwrap().lengths()
        };
        let bytes: Vec<u8> = [7i64, -3].iter().flat_map(|n| n.to_le_bytes()).collect();
        assert_eq!(lengths(Dtype::I64, &bytes[..8]), Ok(vec![7]));
        let message = lengths(Dtype::I64, &bytes).unwrap_err().to_string();
        assert_eq!(message, "kv_lens: entry 1 is -3, but must be at least 0");
        assert_eq!(lengths(Dtype::I32, &bytes[..8]), Ok(vec![7, 0]));
        assert_eq!(lengths(Dtype::U32, &bytes[8..]), Ok(vec![u32::MAX as usize - 2, u32::MAX as usize]));
    }

    #[test]
    fn broken_files_are_refused() {
        let whole = file_of(&[Q], &[0; 4096]);
        let refused = |bytes: &[u8]| super::tensors(bytes, "", String::new()).unwrap_err().to_string();
        for len in 0..whole.len() {
            let message = refused(&whole[..len]);
            assert!(message.starts_with("not a safetensors file: "), "{message}");
        }
        for at in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[at] ^= 0x55;
            refused(&flipped);
        }
        let load = |path: &str| super::load(Path::new(path), "", |_| String::new()).unwrap_err().to_string();
        let message = load("no/such.safetensors");
        assert!(message.starts_with("no/such.safetensors: "), "{message}");
        assert!(load(env!("CARGO_MANIFEST_DIR")).ends_with(": not a file"));
    }
}
