//! Values of flags.

use super::Only;
use crate::failure::{Refused, Result};
use crate::settings::{DTYPES, Groups, Sides};
use sdpa::{Alignment, Dtype, Isa, Point, Precision, Shape};
use std::num::NonZeroUsize;
use std::str::FromStr;

/// More threads than any machine this is meant for has, and few enough to start.
pub(super) const MAX_THREADS: usize = 1024;

pub(crate) fn wrong(flag: &str, got: impl std::fmt::Display, expected: &str) -> Refused {
    Refused::new(format_args!("{flag}: {got}, but must be {expected}"))
}

pub(super) fn number<T: FromStr>(flag: &str, text: &str, expected: &str) -> Result<T> {
    text.parse().map_err(|_| wrong(flag, text, expected))
}

pub(super) fn shape(text: &str) -> Result<Shape> {
    let expected = "seven whole numbers B,H,HKV,LQ,LK,D,DV";
    let sizes = text.split(',').map(|size| number("--shape", size.trim(), expected)).collect::<Result<Vec<usize>>>();
    match sizes.map_err(|_| wrong("--shape", text, expected))?[..] {
        [batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim] => {
            Ok(Shape { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim })
        }
        ref sizes => Err(wrong("--shape", format_args!("{text} has {} numbers", sizes.len()), expected)),
    }
}

pub(super) fn alignment(text: &str) -> Result<Alignment> {
    match text {
        "top-left" => Ok(Alignment::TopLeft),
        "bottom-right" => Ok(Alignment::BottomRight),
        offset => number("--align", offset, "top-left, bottom-right or a whole number").map(Alignment::Offset),
    }
}

pub(super) fn window(text: &str) -> Result<Sides> {
    let expected = "L,R, each a whole number or -";
    let side = |text: &str| match text.trim() {
        "-" => Ok(None),
        n => number("--window", n, expected).map(Some),
    };
    let (left, right) = text.split_once(',').ok_or_else(|| wrong("--window", text, expected))?;
    match (side(left), side(right)) {
        (Ok(left), Ok(right)) => Ok(Sides { left, right }),
        _ => Err(wrong("--window", text, expected)),
    }
}

pub(super) fn groups(text: &str) -> Result<Groups> {
    let wrong = || wrong("--selected", text, "ROWS,UNIT, each a whole number of at least 1");
    let (rows, unit) = text.split_once(',').ok_or_else(wrong)?;
    let one = |text: &str| text.trim().parse().map(NonZeroUsize::get).map_err(|_| wrong());
    Ok(Groups { rows: one(rows)?, unit: one(unit)? })
}

pub(super) fn point(text: &str) -> Result<Point> {
    match text {
        "raw" => Ok(Point::Raw),
        "softcap" => Ok(Point::Softcapped),
        "masked" => Ok(Point::Masked),
        _ => Err(wrong("--scores", text, "raw, softcap or masked")),
    }
}

pub(super) fn isa(text: &str) -> Result<Isa> {
    Isa::from_name(text).ok_or_else(|| {
        let here: Vec<_> = Isa::available().map(Isa::name).collect();
        let problem = if Isa::known().any(|name| name == text) { "not available" } else { "unknown" };
        Refused::new(format_args!("--isa: {text} is {problem}; this machine has {}", here.join(", ")))
    })
}

pub(super) fn threads(text: &str) -> Result<NonZeroUsize> {
    // Without the feature the library runs in order, whatever it is told.
    let most = if cfg!(feature = "rayon") { MAX_THREADS } else { 1 };
    let expected = format!("a whole number from 1 to {most}");
    let threads: NonZeroUsize = number("--threads", text, &expected)?;
    if threads.get() > most { Err(wrong("--threads", text, &expected)) } else { Ok(threads) }
}

pub(super) fn only(text: &str) -> Result<Only> {
    let all = [Only::Fused, Only::Naive, Only::Unfused];
    all.into_iter().find(|only| only.name() == text).ok_or_else(|| wrong("--only", text, "fused, naive or unfused"))
}

pub(super) fn dtype(text: &str) -> Result<Dtype> {
    let found = DTYPES.into_iter().find(|dtype| dtype.to_string() == text);
    found.ok_or_else(|| wrong("--dtype", text, "f32, bf16 or f16"))
}

pub(super) fn precision(text: &str) -> Result<Precision> {
    let all = [Precision::Exact, Precision::Native, Precision::Accurate];
    let found = all.into_iter().find(|precision| precision.to_string() == text);
    found.ok_or_else(|| wrong("--precision", text, "exact, native or accurate"))
}
