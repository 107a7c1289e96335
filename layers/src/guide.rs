//! Documents about layers; their snippets are compiled and run as tests.

#[doc = include_str!("../README.md")]
struct Readme;

#[doc = include_str!("../../docs/guide/soft-dictionary.md")]
struct SoftDictionary;

#[doc = include_str!("../../docs/guide/steps.md")]
struct Steps;

#[doc = include_str!("../../docs/guide/self-attention.md")]
struct SelfAttention;

#[doc = include_str!("../../docs/guide/multi-head.md")]
struct MultiHead;

#[doc = include_str!("../../docs/guide/encoder-decoder.md")]
struct EncoderDecoder;

#[doc = include_str!("../../docs/guide/pytorch.md")]
struct PyTorch;
