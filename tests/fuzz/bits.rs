//! Calls by number, and hashes of all that they write. A call is the same for ever, and so should its bits be:
//! `tests/golden/` has the hashes of the first ones.
//!
//! Calls are drawn as those of the fuzzer are. Here nothing is held against an oracle, so the same call can be made by many
//! more commits and machines in a given time.

use super::case::{Case, Cover, Settings};
use super::compare::Written;
use super::draw::{Home, SHARED, Sizes, draw_of, sizes_of};
use super::functions::Functions;
use super::golden::{Call, Hash};
use super::kinds::attention::{pool, record_case};
use super::kinds::{BITS, BitsOf};
use super::rng::Rng;
use super::selection::Selection;
use core::fmt::{Debug, Write as _};
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use sdpa::{Alignment, Dtype, Exec, Isa, Precision};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;

/// Seed of every call.
const SEED: u64 = 0x6269_7473;
/// Seed of calls with [`Precision::Native`].
const SEED_OF_NATIVE: u64 = 0x6266_3136;
/// Seed of calls with [`Precision::Accurate`].
const SEED_OF_ACCURATE: u64 = 0x7061_7274;

/// Makes a call on every instruction set of the machine.
pub(crate) fn call(number: u64) -> Call {
    let BitsOf { name, make } = BITS[(number % BITS.len() as u64) as usize];
    made(number, name, &mut Rng::of_call(SEED, number), make)
}

/// Makes a call with [`Precision::Native`] on every instruction set of the machine.
pub(crate) fn native_call(number: u64) -> Call {
    made(number, "native", &mut Rng::of_call(SEED_OF_NATIVE, number), |rng, recorder| {
        let home = rng.pick(&[Home::Tensors, Home::Pages, Home::Pool(Dtype::Bf16), Home::Cache(Dtype::Bf16)]);
        let mut case = settled(rng, home);
        case.settings.precision = Precision::Native;
        [case.dtypes[1], case.dtypes[2]] = [Dtype::Bf16; 2];
        case.selected = selects(number).then(|| Selection::draw(rng, &case));
        record_case(rng, recorder, &case, home);
    })
}

/// Makes a call with [`Precision::Accurate`] on every instruction set of the machine.
pub(crate) fn accurate_call(number: u64) -> Call {
    made(number, "accurate", &mut Rng::of_call(SEED_OF_ACCURATE, number), |rng, recorder| {
        let dtype = rng.pick(&[Dtype::F32, Dtype::F32, Dtype::Bf16, Dtype::F16]);
        let home = rng.pick(&[Home::Tensors, Home::Pages, Home::Pool(dtype), Home::Cache(dtype)]);
        let mut case = settled(rng, home);
        case.settings.precision = Precision::Accurate;
        case.selected = selects(number).then(|| Selection::draw(rng, &case));
        record_case(rng, recorder, &case, home);
    })
}

/// True if the rows of a native or accurate call select keys.
fn selects(number: u64) -> bool {
    number % 8 == 7
}

/// A case of few products whose bits are the same everywhere.
fn settled(rng: &mut Rng, home: Home) -> Case {
    let sizes = sizes(rng);
    let mut case = draw_of(rng, home, sizes);
    settle(rng, &mut case);
    case
}

/// Makes a call by its number.
fn made(number: u64, name: &str, rng: &mut Rng, make: impl Fn(&mut Rng, &mut Recorder)) -> Call {
    let threads = 1 + rng.below(2);
    let hashes = Isa::available().map(|isa| (isa, Hash::new())).collect();
    let mut recorder = Recorder { hashes, threads, what: name.to_owned() };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| make(rng, &mut recorder))) {
        eprintln!("bits: call {number}: {}", recorder.what);
        resume_unwind(panic);
    }
    if threads > 1 {
        recorder.say("two threads");
    }
    Call { what: recorder.what, hashes: recorder.hashes.into_iter().map(|(isa, hash)| (isa, hash.value())).collect() }
}

/// Makes calls on `threads` threads, in any order, and returns them in order.
pub(crate) fn calls(numbers: Range<u64>, threads: usize, call: fn(u64) -> Call) -> Vec<Call> {
    if threads < 2 {
        return numbers.map(call).collect();
    }
    let (next, made) = (AtomicU64::new(numbers.start), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= numbers.end {
                        break;
                    }
                    let call = call(number);
                    made.lock().expect("no call panics").push((number, call));
                }
            });
        }
    });
    let mut made = made.into_inner().expect("no call panicked");
    made.sort_by_key(|(number, _)| *number);
    made.into_iter().map(|(_, call)| call).collect()
}

/// One hash of what several calls wrote, for each instruction set; that of a single call is its own.
pub(crate) fn together(calls: &[Call]) -> Vec<(Isa, u64)> {
    if let [call] = calls {
        return call.hashes.clone();
    }
    let one = |(i, isa): (usize, Isa)| {
        let mut hash = Hash::new();
        calls.iter().for_each(|call| hash.number(call.hashes[i].1));
        (isa, hash.value())
    };
    Isa::available().enumerate().map(one).collect()
}

/// What a call says of itself and writes.
#[derive(Debug)]
pub(crate) struct Recorder {
    hashes: Vec<(Isa, Hash)>,
    threads: usize,
    what: String,
}

impl Recorder {
    /// Makes the call on each instruction set, each time with the same random numbers, and records what it wrote.
    pub(crate) fn each<W: IntoIterator<Item = Option<Written>> + Send>(
        &mut self,
        rng: &mut Rng,
        run: impl Fn(&mut Rng, Exec) -> W + Sync,
    ) {
        let start = rng.clone();
        for (isa, hash) in &mut self.hashes {
            let (exec, mut again) = (Exec::serial().isa(*isa).threads(self.threads), start.clone());
            // WebAssembly has one thread.
            let written = match self.threads {
                2.. if cfg!(not(target_family = "wasm")) => pool().install(|| run(&mut again, exec)),
                _ => run(&mut again, exec),
            };
            written.into_iter().for_each(|written| record(hash, written.as_ref()));
            *rng = again;
        }
    }

    pub(crate) fn say(&mut self, what: impl core::fmt::Display) {
        let _ = write!(self.what, ", {what}");
    }

    pub(crate) fn describe(&mut self, case: &Case, home: Home) {
        let ([_, _, _, d], (rows, keys), types) = (case.q.shape, case.longest(), case.dtypes);
        let [b, h, g, dv] = [case.batch(), case.heads(), case.kv_heads(), case.value_dim()];
        let _ = write!(self.what, ", {home:?}, batch {b}, heads {h}/{g}, {rows}×{keys}, dims {d}/{dv}, ");
        let _ = write!(self.what, "{}", types.map(|dtype| dtype.to_string()).join("/"));
        options(&mut self.what, case);
    }
}

fn record(hash: &mut Hash, written: Option<&Written>) {
    let Some(Written { bits, dtype }) = written else { return hash.number(u64::MAX) };
    hash.bytes(dtype.to_string().as_bytes());
    bits.shape.iter().for_each(|&n| hash.number(n as u64));
    bits.data.iter().for_each(|bits| hash.bytes(&bits.to_le_bytes()));
}

/// The options that a case has, without their numbers where there are many.
fn options(line: &mut String, case: &Case) {
    let Case { settings, bias, mask, alibi, sinks, kv_lens, ragged, selected, functions, .. } = case;
    let Settings { scale, softcap, causal, window, alignment, dropout, .. } = settings;
    let shape = |[b, h, l, n]: [usize; 4], cover: Cover| {
        format!("[{b}, {h}, {l}, {n}]{}", if cover == Cover::First { " of the first keys" } else { "" })
    };
    let mut some = |name: &str, x: Option<String>| {
        if let Some(x) = x {
            let _ = write!(line, ", {name}{x}");
        }
    };
    let shown = |x: &dyn Debug| Some(format!(" {x:?}"));
    some("causal", causal.then(String::new));
    some("window", window.and_then(|x| shown(&(x.left, x.right, x.first))));
    some("", alignment.filter(|x| *x != Alignment::TopLeft).map(|x| format!("{x:?}")));
    some("softcap", softcap.and_then(|x| shown(&x)));
    some("scale", scale.and_then(|x| shown(&x)));
    some("dropout", dropout.and_then(|x| shown(&x.p)));
    some("bias", bias.as_ref().map(|(x, dtype)| format!(" {dtype} {}", shape(x.of.shape, x.cover))));
    some("mask", mask.as_ref().map(|(x, _)| format!(" {}", shape(x.of.shape, x.cover))));
    some("ALiBi", alibi.as_ref().map(|_| String::new()));
    some("sinks", sinks.as_ref().map(|_| String::new()));
    some("lengths", kv_lens.as_ref().and_then(|x| shown(x)));
    some("ragged", ragged.as_ref().and_then(|x| shown(x)));
    some(
        "lists",
        selected.as_ref().map(|of| format!(" of {} heads, {} rows, units of {}", of.heads, of.rows, of.unit)),
    );
    let Functions { score, mask, prob, .. } = functions;
    some("score function", score.and_then(|x| shown(&x)));
    some("mask function", mask.and_then(|x| shown(&x)));
    some("weight function", prob.and_then(|x| shown(&x)));
}

/// Sizes of a call: small ones mostly, some that two threads share, few that are next to nothing.
pub(crate) fn sizes(rng: &mut Rng) -> Sizes {
    let least = if rng.one_in(8) { 0 } else { 3 };
    loop {
        let sizes @ [batch, _, _, rows, keys, d, _] = any_sizes(rng);
        if least == 0 || keys >= least && batch > 0 && rows > 0 && d > 1 {
            return sizes;
        }
    }
}

fn any_sizes(rng: &mut Rng) -> Sizes {
    let products = match rng.below(32) {
        0 | 1 => SHARED..=2 * SHARED,
        2..6 => 300_000..=2_000_000,
        6..16 => 20_000..=300_000,
        16..31 => 1_000..=20_000,
        _ => 0..=1_000,
    };
    sizes_of(rng, products)
}

/// Makes the bits of a case the same everywhere, and its numbers ones that show a fault, mostly: a NaN among the keys, or
/// equal weights, leave little else to be seen.
pub(crate) fn settle(rng: &mut Rng, case: &mut Case) {
    let settings = &mut case.settings;
    settings.precision = Precision::Exact;
    if rng.one_in(4) {
        return;
    }
    settings.scale = settings.scale.filter(|x| x.abs() > 0.01);
    settings.softcap = settings.softcap.filter(|x| (0.1..100.0).contains(x));
    settings.alignment = settings.alignment.map(|alignment| match alignment {
        Alignment::Offset(n) if n.unsigned_abs() > 2000 => Alignment::BottomRight,
        near => near,
    });
    case.make_tame();
}
