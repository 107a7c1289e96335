//! Documents whose snippets are compiled and run as tests.

#[doc = include_str!("../README.md")]
struct Readme;

#[doc = include_str!("../docs/options.md")]
struct Options;

#[doc = include_str!("../docs/guide/soft-dictionary.md")]
struct SoftDictionary;

#[doc = include_str!("../docs/guide/steps.md")]
struct Steps;

#[doc = include_str!("../docs/guide/self-attention.md")]
struct SelfAttention;

#[doc = include_str!("../docs/guide/cross-attention.md")]
struct CrossAttention;

#[doc = include_str!("../docs/guide/masked-self-attention.md")]
struct MaskedSelfAttention;

#[doc = include_str!("../docs/guide/multi-head.md")]
struct MultiHead;

#[doc = include_str!("../docs/guide/encoder-decoder.md")]
struct EncoderDecoder;

#[doc = include_str!("../docs/guide/layouts.md")]
struct Layouts;

#[doc = include_str!("../docs/guide/masks.md")]
struct Masks;

#[doc = include_str!("../docs/guide/caches.md")]
struct Caches;

#[doc = include_str!("../docs/guide/serving.md")]
struct Serving;

#[doc = include_str!("../docs/guide/threads.md")]
struct Threads;

#[doc = include_str!("../docs/guide/gradients.md")]
struct Gradients;

#[doc = include_str!("../docs/guide/types.md")]
struct Types;

#[doc = include_str!("../docs/guide/reproducibility.md")]
struct Reproducibility;

#[doc = include_str!("../docs/guide/pytorch.md")]
struct PyTorch;
