//! Documents whose snippets are compiled and run as tests.

#[doc = include_str!("../README.md")]
struct Readme;
