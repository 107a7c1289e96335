//! Bits that stay: hashes of what numbered calls write, and files that say what they were.
#![allow(dead_code, reason = "compiled into each test of golden bits and into the fuzzer; none uses all of it")]

use sdpa::Isa;
use std::path::Path;

/// FNV-1a of 64 bits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hash(u64);

impl Hash {
    pub(crate) const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    pub(crate) fn number(&mut self, n: u64) {
        self.bytes(&n.to_le_bytes());
    }

    /// Numbers with their count, bit for bit.
    pub(crate) fn floats(&mut self, floats: &[f32]) {
        self.number(floats.len() as u64);
        floats.iter().for_each(|x| self.bytes(&x.to_bits().to_le_bytes()));
    }

    pub(crate) const fn value(self) -> u64 {
        self.0
    }
}

/// Unit normal number, nearly: the sum of twelve of 21 bits, of variance 1/12 each. Integers are the same on every machine;
/// logarithms and cosines are not.
pub(crate) fn normal(mut bits: impl FnMut() -> u64) -> f32 {
    const MOST: i32 = (1 << 21) - 1;
    let three = |x: u64| (0..3).map(|i| (x >> (21 * i)) as i32 & MOST).sum::<i32>();
    let sum: i32 = (0..4).map(|_| three(bits())).sum();
    (sum - 6 * MOST) as f32 / MOST as f32
}

/// A call that was made.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// Its kind and options, in a line.
    pub(crate) what: String,
    /// Everything that it wrote, on each instruction set.
    pub(crate) hashes: Vec<(Isa, u64)>,
}

/// Variable that has files written, not compared, if it is `write`.
const VARIABLE: &str = "SDPA_GOLDEN";

/// Returns true if files are written, not compared.
pub(crate) fn are_written() -> bool {
    match std::env::var(VARIABLE) {
        Err(_) => false,
        Ok(value) => {
            assert_eq!(value, "write", "{VARIABLE}");
            true
        }
    }
}

/// File of the package's `tests/golden`, and the instruction sets whose bits it has.
pub(crate) type File = (&'static str, fn(Isa) -> bool);

/// Files of exact calls: instruction sets with FMA all have the same bits.
pub(crate) const EXACT: [File; 2] = [("fma.txt", Isa::has_fma), ("no_fma.txt", |isa| !isa.has_fma())];

/// Files of calls with [`sdpa::Precision::Native`], by the arithmetic of the instruction set: AVX512_BF16, or a matrix unit.
pub(crate) const NATIVE: [File; 2] = [
    ("native_pairs.txt", |isa| {
        let of_x86 = cfg!(all(target_arch = "x86_64", not(matrix_unit_model)));
        of_x86 && isa.has_native_bf16() && !has_unit(isa)
    }),
    ("native_tiles.txt", has_unit),
];

/// File of calls with [`sdpa::Precision::Accurate`], of instruction sets with a matrix unit.
pub(crate) const ACCURATE: [File; 1] = [("accurate_tiles.txt", has_unit)];

/// Returns true if pairs are multiplied by a matrix unit, or by its model.
fn has_unit(isa: Isa) -> bool {
    isa.has_fma() && isa.matrix_unit().is_ok()
}

/// Holds calls, from number 0 on, against files. Panics at the first call that differs. `command` runs the test. On a 32-bit
/// machine calls with numbers in `far` are not compared.
pub(crate) fn check(calls: &[Call], files: &[File], far: &[usize], command: &str) {
    for &(name, has) in files {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        // The fuzzer's package has the root's.
        let folder =
            ["tests/golden", "../tests/golden"].map(|folder| package.join(folder)).into_iter().find(|f| f.exists());
        let path = folder.expect("a folder of golden files").join(name);
        let isas: Vec<Isa> = Isa::available().filter(|&isa| has(isa)).collect();
        let Some(first) = isas.first() else {
            println!("{name}: NOT compared, this machine has no such instruction set");
            continue;
        };
        if are_written() {
            std::fs::write(&path, text(calls, *first)).expect("a file can be written");
        }
        let golden = std::fs::read_to_string(&path).expect("a golden file");
        let command = format!("{VARIABLE}=write {command}");
        if usize::BITS == 32 && !far.is_empty() {
            println!("{name}: calls {far:?} NOT compared, their positions are beyond 32 bits");
            let golden = without(&golden, far);
            isas.iter().for_each(|isa| compare(&golden, &without(&of_64_bits(text(calls, *isa)), far), *isa, &command));
        } else {
            isas.iter().for_each(|isa| compare(&golden, &text(calls, *isa), *isa, &command));
        }
    }
}

fn hash_on(call: &Call, isa: Isa) -> u64 {
    call.hashes.iter().find(|(of, _)| *of == isa).expect("calls are made on every instruction set").1
}

fn text(calls: &[Call], isa: Isa) -> String {
    let line = |(number, call): (usize, &Call)| format!("{number} {:016x} {}\n", hash_on(call, isa), call.what);
    let heading =
        "# Number, hash of all that was written, and what the call is: CONTRIBUTING.md, Golden bits.\n".to_owned();
    let lines: String = calls.iter().enumerate().map(line).collect();
    heading + &lines
}

/// Lines without those of some calls.
fn without(lines: &str, calls: &[usize]) -> String {
    let left_out = |line: &str| calls.iter().any(|call| line.starts_with(&format!("{call} ")));
    lines.lines().filter(|line| !left_out(line)).map(|line| line.to_owned() + "\n").collect()
}

/// Calls of a 32-bit machine in the words of a 64-bit one, which differ in the largest numbers.
fn of_64_bits(lines: String) -> String {
    let pairs = [
        (u32::MAX.to_string(), u64::MAX.to_string()),
        (i32::MAX.to_string(), i64::MAX.to_string()),
        (i32::MIN.to_string(), i64::MIN.to_string()),
        ((1u64 << 20).to_string(), (1u64 << 40).to_string()),
    ];
    pairs.iter().fold(lines, |lines, (of_32, of_64)| lines.replace(of_32, of_64))
}

/// Panics unless the calls are those of a file, with the same hashes.
fn compare(golden: &str, expected: &str, isa: Isa, command: &str) {
    if golden == expected {
        return;
    }
    let differ = |(got, expected): &(&str, &str)| got != expected;
    let lines = || expected.lines().zip(golden.lines());
    let count = lines().filter(differ).count();
    let Some((got, expected)) = lines().find(differ) else { panic!("{isa}: the file has more calls, or fewer") };
    let what = |line: &str| line.splitn(3, ' ').nth(2).unwrap_or_default().to_owned();
    let why = if what(got) == what(expected) { "bits have changed" } else { "the call is another" };
    panic!("{isa}, {why}, in {count} lines, the first:\n  {got}\nexpected\n  {expected}\nIf that is meant: {command}");
}
