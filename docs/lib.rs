//! Pages of this folder: their snippets are compiled and run as tests, by `cargo test --doc -p sdpa-docs`.

#[cfg(doctest)]
#[doc = include_str!("options.md")]
struct Options;

#[cfg(doctest)]
#[doc = include_str!("guide/soft-dictionary.md")]
struct SoftDictionary;

#[cfg(doctest)]
#[doc = include_str!("guide/steps.md")]
struct Steps;

#[cfg(doctest)]
#[doc = include_str!("guide/self-attention.md")]
struct SelfAttention;

#[cfg(doctest)]
#[doc = include_str!("guide/cross-attention.md")]
struct CrossAttention;

#[cfg(doctest)]
#[doc = include_str!("guide/masked-self-attention.md")]
struct MaskedSelfAttention;

#[cfg(doctest)]
#[doc = include_str!("guide/multi-head.md")]
struct MultiHead;

#[cfg(doctest)]
#[doc = include_str!("guide/encoder-decoder.md")]
struct EncoderDecoder;

#[cfg(doctest)]
#[doc = include_str!("guide/layouts.md")]
struct Layouts;

#[cfg(doctest)]
#[doc = include_str!("guide/masks.md")]
struct Masks;

#[cfg(doctest)]
#[doc = include_str!("guide/selected-keys.md")]
struct SelectedKeys;

#[cfg(doctest)]
#[doc = include_str!("guide/caches.md")]
struct Caches;

#[cfg(doctest)]
#[doc = include_str!("guide/serving.md")]
struct Serving;

#[cfg(doctest)]
#[doc = include_str!("guide/threads.md")]
struct Threads;

#[cfg(doctest)]
#[doc = include_str!("guide/gradients.md")]
struct Gradients;

#[cfg(doctest)]
#[doc = include_str!("guide/types.md")]
struct Types;

#[cfg(doctest)]
#[doc = include_str!("guide/reproducibility.md")]
struct Reproducibility;

#[cfg(doctest)]
#[doc = include_str!("guide/pytorch.md")]
struct PyTorch;

#[cfg(doctest)]
#[doc = include_str!("guide/in-place-of-matmul.md")]
struct InPlaceOfMatmul;
