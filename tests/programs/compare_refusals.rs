//! How the `compare` program refuses: one line on standard error that names what is wrong, exit status 2, nothing on
//! standard output and no file.

use crate::program::run;
#[cfg(target_os = "linux")]
use crate::program::run_in_shell;
use crate::temporary_folder::TemporaryFolder;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Runs a line of arguments, `FILE` standing for `file`, and gives what is said.
fn refusal(line: &str, file: &Path) -> String {
    let ran = run(line.split_whitespace().map(|word| match word {
        "FILE" => file.as_os_str().to_owned(),
        word => OsString::from(word),
    }));
    let said = String::from_utf8(ran.stderr).expect("UTF-8");
    assert_eq!(ran.status.code(), Some(2), "{line}: {said}");
    assert_eq!(ran.stdout, b"", "{line}");
    assert!(said.ends_with('\n') && said.lines().count() == 1, "{line}: {said}");
    said.strip_prefix("compare: ").expect("the program's name").trim_end().to_owned()
}

type Spec<'a> = (&'a str, Dtype, &'a [usize]);

/// Two sequences of two heads, three rows, five keys.
const QKV: [Spec<'_>; 3] =
    [("q", Dtype::F32, &[2, 2, 3, 4]), ("k", Dtype::F32, &[2, 1, 5, 4]), ("v", Dtype::F32, &[2, 1, 5, 6])];

/// Writes these tensors, every byte of them `fill`.
fn write(folder: &TemporaryFolder, tensors: &[Spec<'_>], fill: u8) -> PathBuf {
    let bytes = vec![fill; 4096];
    let views = tensors.iter().map(|&(name, dtype, shape)| {
        let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (name, TensorView::new(dtype, shape.to_vec(), &bytes[..len]).expect("bytes for the shape"))
    });
    let path = folder.file("in.safetensors");
    std::fs::write(&path, safetensors::serialize(views, None).expect("tensors")).expect("a file");
    path
}

#[test]
fn bad_flags() {
    let nothing = Path::new("");
    for (line, expected) in [
        ("--casual", "--casual: unknown flag; --help lists them"),
        ("--window 3", "--window: 3, but must be L,R, each a whole number or -"),
        ("--softcap 0", "softcap: 0, but must be positive and finite"),
        ("--softcap -2", "softcap: -2, but must be positive and finite"),
        ("--softcap inf", "softcap: inf, but must be positive and finite"),
        ("--scale nan", "scale: NaN, but must be finite"),
        ("--dtype f64", "--dtype: f64, but must be f32, bf16 or f16"),
        ("--precision best", "--precision: best, but must be exact, native or accurate"),
        ("--only naive --precision native", "--precision: is about the fused path, but --only is naive"),
        ("--backward --precision native", "--precision: is about the forward pass, but got --backward too"),
        ("--weights", "--weights: needs --output, where they are written, but there is none"),
        ("--scores raw", "--scores: needs --output, where they are written, but there is none"),
        ("--selected 1", "--selected: 1, but must be ROWS,UNIT, each a whole number of at least 1"),
        ("--selected 16,64", "--selected: 16,64, but there is no tensor selected"),
        ("--backward --selected 1,1", "--selected: is about the forward pass, but got --backward too"),
        ("--explain --json", "--explain: goes with the table, but got --json too"),
        (
            "--only unfused --softcap 3",
            "no unfused path: softcap: needs the fused path; the unfused baseline has no such option",
        ),
        (
            "--shape 1,1,1,3,5,4,4 --window 1,1",
            "window: 3 rows and 5 keys differ, and no alignment says where the rows stand among the keys (top-left, \
             bottom-right or an offset)",
        ),
    ] {
        assert_eq!(refusal(line, nothing), expected, "{line}");
    }
}

#[test]
fn bad_tensors_leave_nothing_behind() {
    let folder = TemporaryFolder::new("refusals");
    let output = folder.file("out.safetensors");
    let line = format!("FILE --causal --align bottom-right --output {}", output.display());
    for (extra, fill, expected) in [
        (("bias", Dtype::F16, &[2, 2, 3, 5][..]), 0, "bias: dtype is F16, but must be F32"),
        (("bias", Dtype::F32, &[2, 2, 4, 5]), 0, "bias: rows is 4, but the call has 3"),
        (("bias", Dtype::F32, &[3, 2, 3, 5]), 0, "bias: batch is 3, but the call has 2"),
        (("bias", Dtype::F32, &[2, 2, 3, 6]), 0, "bias: columns is 6, but k (rows) has 5"),
        (
            ("bias", Dtype::F32, &[3, 5]),
            0,
            "bias: shape [3, 5] has 2 dimensions, but must have 4: batch, heads, rows, dim",
        ),
        (("mask", Dtype::I32, &[2, 2, 3, 5]), 0, "mask: dtype is I32, but must be BOOL or U8"),
        (("mask", Dtype::U8, &[2, 3, 3, 5]), 0, "mask: heads is 3, but the call has 2"),
        (("sinks", Dtype::F32, &[1]), 0, "sinks: length is 1, but q (heads) has 2"),
        (("alibi_slopes", Dtype::F32, &[3]), 0, "alibi slopes: length is 3, but q (heads) has 2"),
        (("alibi_slopes", Dtype::F32, &[2]), 255, "alibi slopes: NaN, but must be finite"),
        (("kv_lens", Dtype::F32, &[2]), 0, "kv_lens: dtype is F32, but must be I32, I64, U32 or U64"),
        (("kv_lens", Dtype::I64, &[3]), 0, "kv_lens: length is 3, but the batch has 2"),
        (("kv_lens", Dtype::I64, &[2]), 255, "kv_lens: entry 0 is -1, but must be at least 0"),
        (
            ("kv_lens", Dtype::U32, &[2]),
            255,
            "kv_lens: entry 0 is 4294967295, but must be at most 5, the keys of that sequence",
        ),
    ] {
        let file = write(&folder, &[&QKV[..], &[extra]].concat(), fill);
        let said = refusal(&line, &file);
        // What is wrong with the file alone is said of the file.
        let said = said.strip_prefix(&format!("{}: ", file.display())).unwrap_or(&said);
        assert_eq!(said, expected);
        assert!(!output.exists(), "{expected}");
    }
    let file = write(&folder, &QKV, 0);
    assert_eq!(run([file.as_os_str(), "--output".as_ref(), output.as_os_str()]).status.code(), Some(0));
    assert!(output.exists(), "without those tensors it does write");
}

/// Lists that do not fit two sequences of three rows and five keys.
#[test]
fn bad_lists() {
    let folder = TemporaryFolder::new("lists");
    let good: Spec<'_> = ("selected", Dtype::I32, &[2, 1, 3, 1]);
    for (tensors, fill, flags, expected) in [
        (&[("selected", Dtype::I64, good.2)][..], 0, "", "selected: dtype is I64, but must be I32"),
        (
            &[("selected", Dtype::I32, &[2, 3, 1])],
            0,
            "",
            "selected: shape [2, 3, 1] has 3 dimensions, but must have 4: batch, heads, groups, places",
        ),
        (&[good, ("selected_lens", Dtype::I64, &[2])], 0, "", "selected_lens: dtype is I64, but must be I32"),
        (
            &[good, ("selected_lens", Dtype::I32, &[3])],
            0,
            "",
            "selected keys: number of lengths is 3, but the shape says 6",
        ),
        (&[good], 0, "--selected 2,1", "selected keys: groups of the numbers is 6, but the shape says 4"),
        (
            &[("selected", Dtype::I32, &[2, 3, 3, 1])],
            0,
            "",
            "selected keys: heads is 3, but q (a list is for all heads, a key/value head or a query head) has 2",
        ),
        (
            &[("selected", Dtype::I32, &[2, 1, 3, 2])],
            0,
            "",
            "selected keys: the list of sequence 0, head 0, row 0 has 0 at places 0 and 1",
        ),
        (
            &[good],
            1,
            "",
            "selected keys: the list of sequence 0, head 0, row 0 has 16843009 at place 0, but its sequence has 5 units (−1 marks \
             an absent one)",
        ),
        (&[good], 0, "--backward", "selected: [2, 1, 3, 1], but gradients take no lists, and got --backward"),
        (
            &[good],
            0,
            "--only unfused",
            "no unfused path: selected keys: needs the fused path; the unfused baseline has no such option",
        ),
    ] {
        let file = write(&folder, &[&QKV[..], tensors].concat(), fill);
        let said = refusal(&format!("FILE {flags}"), &file);
        assert_eq!(said.strip_prefix(&format!("{}: ", file.display())).unwrap_or(&said), expected);
    }
}

/// A file of some bytes may have a tensor of any sizes if one of them is 0.
#[test]
fn calls_without_rows() {
    const HUGE: usize = 1 << 40;
    let folder = TemporaryFolder::new("empty");
    for (q, kv) in [
        ([HUGE, 1, 0, 4], [HUGE, 1, 0, 4]),
        ([1, HUGE, 0, 4], [1, HUGE, 0, 4]),
        ([1, 0, HUGE, 4], [1, 0, HUGE, 4]),
        ([0, 1, HUGE, 4], [0, 1, HUGE, 4]),
        ([1, 1, 0, 4], [1, 1, 5, 4]),
    ] {
        let file = write(&folder, &[("q", Dtype::F32, &q), ("k", Dtype::F32, &kv), ("v", Dtype::F32, &kv)], 0);
        let expected = format!("q: shape {q:?} has no rows, so there is nothing to compare");
        for line in ["FILE", "FILE --explain", "FILE --only fused --json"] {
            assert_eq!(refusal(line, &file), expected, "{line}");
        }
    }
    let line = format!("--shape {HUGE},1,1,0,0,4,4");
    assert_eq!(
        refusal(&line, Path::new("")),
        format!("q: shape [{HUGE}, 1, 0, 4] has no rows, so there is nothing to compare")
    );
}

#[test]
fn bad_files() {
    let folder = TemporaryFolder::new("files");
    let missing = folder.file("missing.safetensors");
    let said = refusal("FILE", &missing);
    assert!(said.starts_with(&missing.display().to_string()), "{said}");
    let file = write(&folder, &QKV, 0);
    let whole = std::fs::read(&file).expect("what was just written");
    for len in [0, 7, 100, whole.len() - 1] {
        std::fs::write(&file, &whole[..len]).expect("a file");
        let said = refusal("FILE", &file);
        assert!(said.contains(": not a safetensors file: "), "{said}");
    }
    let file = write(&folder, &QKV[..2], 0);
    assert_eq!(refusal("FILE", &file), format!("{}: no tensor v; there are 2: k, q", file.display()));
    // 0x7f7f7f7f: large, but finite.
    let file = write(&folder, &QKV, 0x7f);
    assert_eq!(refusal("FILE --dtype f16", &file), "--dtype: q has 3.3961514e38, which f16 cannot hold");
    let nowhere = format!("FILE --output {}", folder.file("none/out").display());
    let (out, none) = (folder.file("none/out"), folder.file("none"));
    let expected = format!("--output: {}: there is no folder {}", out.display(), none.display());
    let file = write(&folder, &QKV, 0);
    assert_eq!(refusal(&nowhere, &file), expected);
    if cfg!(target_os = "linux") {
        // A folder that is there and takes no files, whoever asks: found before there is anything to write.
        let said = refusal("FILE --output /proc/out", &file);
        assert!(said.starts_with("--output: /proc/out: "), "{said}");
        let said = refusal("--sweep /proc", &file);
        assert!(said.starts_with("--sweep: /proc: "), "{said}");
    }
}

/// Where memory ends, the program says how many threads could be started, instead of being ended.
#[cfg(target_os = "linux")]
#[test]
fn threads_that_cannot_be_started_are_refused_with_their_number() {
    for flags in ["--only fused", "--only fused --backward"] {
        let line = format!("ulimit -v 2000000 && exec \"$0\" --threads 1024 --shape 1,1,1,64,64,8,8 {flags}");
        let ran = run_in_shell(&line);
        let said = String::from_utf8_lossy(&ran.stderr);
        assert_eq!((ran.status.code(), said.lines().count(), ran.stdout.len()), (Some(2), 1, 0), "{said}");
        let words = said.strip_prefix("compare: --threads: 1024, but only ").expect("the argument");
        let (started, words) = words.split_once(" could be started: ").expect("a number");
        assert!((1..1024).contains(&started.parse::<usize>().unwrap()) && !words.trim().is_empty(), "{said}");
    }
}
