//! Documents with snippets that are compiled and run as tests; those with layers in them are in `layers/src/guide.rs`.

#[doc = include_str!("../README.md")]
struct Readme;

#[doc = include_str!("../docs/options.md")]
struct Options;

#[doc = include_str!("../docs/guide/cross-attention.md")]
struct CrossAttention;

#[doc = include_str!("../docs/guide/masked-self-attention.md")]
struct MaskedSelfAttention;

#[doc = include_str!("../docs/guide/layouts.md")]
struct Layouts;

#[doc = include_str!("../docs/guide/masks.md")]
struct Masks;

#[doc = include_str!("../docs/guide/selected-keys.md")]
struct SelectedKeys;

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

#[doc = include_str!("../docs/guide/in-place-of-matmul.md")]
struct InPlaceOfMatmul;
