//! Settings of a call: `sdpa`'s own, made of Python's numbers and words.

use crate::arguments::Arguments;
use crate::errors::{value, wrong_type};
use pyo3::prelude::*;
use sdpa::{Alignment, Attention, CurrentPool, Exec, Executor, Isa, Precision, Window};
use std::process;
use std::sync::OnceLock;

/// Returns the settings of the call's arithmetic and rules.
///
/// # Errors
/// `TypeError` or `ValueError`, which name the argument.
pub(crate) fn attention(arguments: &Arguments<'_, '_>) -> PyResult<Attention> {
    let mut attention = Attention::new();
    if let Some(scale) = arguments.optional("scale", "float or None")? {
        attention = attention.scale(scale);
    }
    if let Some(softcap) = arguments.optional("softcap", "float or None")? {
        attention = attention.softcap(softcap);
    }
    if let Some(window) = window(arguments)? {
        attention = attention.window(window);
    }
    let mut alignment = alignment(arguments)?;
    if arguments.required("is_causal", "bool")? {
        // Torch's causal rows stand at the first keys.
        (attention, alignment) = (attention.causal(), alignment.or(Some(Alignment::TopLeft)));
    }
    if let Some(alignment) = alignment {
        attention = attention.align(alignment);
    }
    if let Some(precision) = precision(arguments)? {
        attention = attention.precision(precision);
    }
    dropout(arguments, attention)
}

fn window(arguments: &Arguments<'_, '_>) -> PyResult<Option<Window>> {
    type Sides = (Option<i64>, Option<i64>);
    let Some((left, right)) = arguments.optional::<Sides>("window", "tuple (left, right) of int or None")? else {
        return Ok(None);
    };
    let side = |name: &str, keys: Option<i64>| {
        let keys = keys.map(|keys| usize::try_from(keys).map_err(|_| keys)).transpose();
        let least = |got| format!("{name} is {got}, but must be at least 0, or None for all keys on that side");
        keys.map_err(|got| value("window", least(got)))
    };
    Ok(Some(Window::inclusive(side("left", left)?, side("right", right)?)))
}

fn alignment(arguments: &Arguments<'_, '_>) -> PyResult<Option<Alignment>> {
    const EXPECTED: &str = "'top-left', 'bottom-right' or int, the number of keys before the first row";
    let Some(given) = arguments.any("alignment")? else { return Ok(None) };
    if let Ok(word) = given.extract::<String>() {
        return match &*word {
            "top-left" => Ok(Some(Alignment::TopLeft)),
            "bottom-right" => Ok(Some(Alignment::BottomRight)),
            _ => Err(value("alignment", format_args!("{word:?}, but must be {EXPECTED}"))),
        };
    }
    let offset = given.extract().map(Alignment::Offset);
    offset.map(Some).or_else(|_| Err(wrong_type("alignment", given.get_type().name()?, EXPECTED)))
}

fn precision(arguments: &Arguments<'_, '_>) -> PyResult<Option<Precision>> {
    let Some(word) = arguments.optional::<String>("precision", "str or None")? else { return Ok(None) };
    match &*word {
        "exact" => Ok(Some(Precision::Exact)),
        "native" => Ok(Some(Precision::Native)),
        "accurate" => Ok(Some(Precision::Accurate)),
        _ => Err(value("precision", format_args!("{word:?}, but must be 'exact', 'native' or 'accurate'"))),
    }
}

/// Adds dropout of weights, unless its probability is 0.
fn dropout(arguments: &Arguments<'_, '_>, attention: Attention) -> PyResult<Attention> {
    let p = arguments.required("dropout_p", "float")?;
    match arguments.optional("dropout_seed", "int from 0 to 2**64 - 1, or None")? {
        _ if p == 0.0 => Ok(attention),
        Some(seed) => Ok(attention.dropout(p, seed, 0)),
        None => Err(value("dropout_p", format_args!("{p}, but dropout_seed is None: there is no global generator"))),
    }
}

/// Returns the instruction set, and how many threads of rayon's global pool may work.
///
/// # Errors
/// `TypeError` or `ValueError`, which name the argument.
pub(crate) fn exec(arguments: &Arguments<'_, '_>) -> PyResult<Exec<'static>> {
    let exec = match arguments.optional::<i64>("threads", "int or None")? {
        Some(threads @ ..=0) => return Err(value("threads", format_args!("{threads}, but must be at least 1"))),
        Some(threads) => with_threads(usize::try_from(threads).unwrap_or(usize::MAX)),
        None => with_threads(usize::MAX),
    };
    let Some(name) = arguments.optional::<String>("isa", "str or None")? else { return Ok(exec) };
    let Some(isa) = Isa::from_name(&name) else {
        let names: Vec<_> = Isa::available().map(Isa::name).collect();
        return Err(value("isa", format_args!("{name:?}, but must be one of {names:?}")));
    };
    Ok(exec.isa(isa))
}

/// Returns up to `most` threads of the pool, or the calling thread alone if the pool is that of a parent process: a fork has the
/// pool's memory, but not its threads, and would wait for them for ever.
fn with_threads(most: usize) -> Exec<'static> {
    /// Process that first used the pool.
    static OWNER: OnceLock<u32> = OnceLock::new();
    if most == 1 || *OWNER.get_or_init(process::id) != process::id() {
        return Exec::serial();
    }
    Exec::default().threads(most.min(CurrentPool.threads()))
}
