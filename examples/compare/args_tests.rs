//! Every flag, and every way to get one wrong.

use super::values::MAX_THREADS;
use super::*;
use crate::help::HELP;
use crate::settings::{DTYPES, Sides};
use sdpa::{Alignment, Precision};

fn parse_words(line: &str) -> Result<Command> {
    parse(line.split_whitespace().map(OsString::from))
}

fn args(line: &str) -> Args {
    match parse_words(line) {
        Ok(Command::Compare(args)) => *args,
        other => panic!("{line}: {other:?}"),
    }
}

fn refusal(line: &str) -> String {
    refusal_of(&line.split_whitespace().collect::<Vec<_>>())
}

fn refusal_of(words: &[&str]) -> String {
    parse(words.iter().map(OsString::from)).expect_err(&words.join(" ")).to_string()
}

#[test]
fn nothing_means_the_paragraph_on_every_path() {
    let args = args("");
    assert_eq!(args.source, Source::Paragraph);
    assert_eq!((args.dtype, args.only, args.isa, args.threads, args.repeat), (None, None, None, None, None));
    assert_eq!((args.output, args.format, args.settings), (None, Format::Table, Settings::default()));
    assert!(args.points.is_empty() && !args.explain);
}

#[test]
fn every_flag_is_read() {
    let args = args(
        "--shape 1,8,2,3,4,5,6 --scale -0.3 --causal --align -3 --isa portable --threads 1 --only fused --repeat 7 \
         --output out.safetensors --json --window 3,- --softcap 2.5 --scores masked --weights --scores raw --dtype bf16 \
         --precision native --selected 16,64",
    );
    let shape = Shape { batch: 1, heads: 8, kv_heads: 2, q_len: 3, kv_len: 4, head_dim: 5, value_dim: 6 };
    assert_eq!(args.source, Source::Random(shape));
    let alignment = Some(Alignment::Offset(-3));
    let window = Some(Sides { left: Some(3), right: None });
    let (scale, softcap, causality) = (Some(-0.3), Some(2.5), Causality::Causal);
    let precision = Precision::Native;
    assert_eq!(args.settings, Settings { scale, softcap, causality, window, alignment, precision });
    assert_eq!(args.selected, Some(Groups { rows: 16, unit: 64 }));
    assert_eq!(args.dtype, Some(Dtype::Bf16));
    assert_eq!(args.points, [Point::Masked, Point::Raw, Point::Weights]);
    assert_eq!(args.isa.map(Isa::name), Some("portable"));
    assert_eq!((args.threads, args.repeat), (NonZeroUsize::new(1), NonZeroUsize::new(7)));
    assert_eq!((args.only, args.format), (Some(Only::Fused), Format::Json));
    assert_eq!(args.output, Some(PathBuf::from("out.safetensors")));
}

#[test]
fn values_may_be_attached_and_files_stand_anywhere() {
    let args = args("--align=bottom-right mine.safetensors --scale=-1e-3");
    assert_eq!(args.source, Source::File(PathBuf::from("mine.safetensors")));
    assert_eq!(args.settings.alignment, Some(Alignment::BottomRight));
    assert_eq!(args.settings.scale, Some(-1e-3));
    let neither = Some(Sides { left: None, right: None });
    assert_eq!(self::args("--window -,-").settings.window, neither);
    assert_eq!(self::args("--window=-,0").settings.window, Some(Sides { left: None, right: Some(0) }));
    assert!(self::args("--explain").explain);
    assert_eq!(self::args("--align top-left").settings.alignment, Some(Alignment::TopLeft));
}

#[test]
fn element_types_and_precisions_have_names() {
    for dtype in DTYPES {
        assert_eq!(args(&format!("--dtype={dtype}")).dtype, Some(dtype));
    }
    for precision in [Precision::Exact, Precision::Native] {
        assert_eq!(args(&format!("--precision {precision}")).settings.precision, precision);
    }
    for bad in ["BF16", "bfloat16", "f64", "int8", ""] {
        assert_eq!(refusal_of(&["--dtype", bad]), format!("--dtype: {bad}, but must be f32, bf16 or f16"));
    }
    for bad in ["fast", "Exact", ""] {
        assert_eq!(
            refusal_of(&["--precision", bad]),
            format!("--precision: {bad}, but must be exact, native or accurate")
        );
    }
    assert_eq!(refusal("--dtype bf16 --dtype f16"), "--dtype: given twice, the second time as f16");
    assert_eq!(refusal("--precision --json"), "--precision: needs a value, but got the flag --json");
    // The other paths read rounded numbers, too.
    assert_eq!(args("--only naive --dtype f16").dtype, Some(Dtype::F16));
}

#[test]
fn help_wins() {
    assert_eq!(parse_words("--causal --help").unwrap(), Command::Help);
    assert_eq!(parse_words("-h").unwrap(), Command::Help);
    for flag in VALUED.into_iter().chain(["--causal", "--weights", "--explain", "--json", "--sweep"]) {
        assert!(HELP.contains(flag), "{flag}");
    }
}

#[test]
fn unknown_words_are_named() {
    assert_eq!(refusal("--casual"), "--casual: unknown flag; --help lists them");
    assert_eq!(refusal("-3"), "-3: unknown flag; --help lists them");
    assert_eq!(refusal("--wide=3"), "--wide: unknown flag; --help lists them");
    assert_eq!(refusal("--json=1"), "--json: takes no value, but got 1");
    assert_eq!(refusal("a b"), "one file at a time, but got a and b");
    assert_eq!(refusal("a --shape 1,1,1,1,1,1,1"), "a file or a shape, but got both: a and --shape");
}

#[test]
fn missing_and_repeated_values_are_named() {
    assert_eq!(refusal("--scale"), "--scale: needs a value, but is the last word");
    assert_eq!(refusal("--scale --causal"), "--scale: needs a value, but got the flag --causal");
    assert_eq!(refusal("--repeat 3 --repeat 4"), "--repeat: given twice, the second time as 4");
}

#[test]
fn wrong_values_are_named_with_the_right_ones() {
    let shape = "but must be seven whole numbers B,H,HKV,LQ,LK,D,DV";
    assert_eq!(refusal("--shape 1,2,3"), format!("--shape: 1,2,3 has 3 numbers, {shape}"));
    assert_eq!(refusal("--shape 1,1,1,1,-1,1,1"), format!("--shape: 1,1,1,1,-1,1,1, {shape}"));
    assert_eq!(
        refusal("--shape 1,1,1,1,1,1,99999999999999999999"),
        format!("--shape: 1,1,1,1,1,1,99999999999999999999, {shape}")
    );
    assert_eq!(refusal("--scale big"), "--scale: big, but must be a number");
    assert_eq!(refusal("--align left"), "--align: left, but must be top-left, bottom-right or a whole number");
    assert_eq!(refusal("--align 1.5"), "--align: 1.5, but must be top-left, bottom-right or a whole number");
    assert_eq!(refusal("--repeat 0"), "--repeat: 0, but must be a whole number of at least 1");
    assert_eq!(refusal("--repeat -2"), "--repeat: -2, but must be a whole number of at least 1");
    for groups in ["3", "0,1", "1,0", "1,-1", "1,2,3", "a,b"] {
        let message = format!("--selected: {groups}, but must be ROWS,UNIT, each a whole number of at least 1");
        assert_eq!(refusal(&format!("--selected {groups}")), message);
    }
    for window in ["3", "3,", ",", "-1,0", "1,2,3", "a,b"] {
        let message = format!("--window: {window}, but must be L,R, each a whole number or -");
        assert_eq!(refusal(&format!("--window {window}")), message);
    }
    assert_eq!(refusal("--softcap none"), "--softcap: none, but must be a number");
    assert_eq!(refusal("--scores all"), "--scores: all, but must be raw, softcap or masked");
    assert_eq!(refusal("--only all"), "--only: all, but must be fused, naive or unfused");
}

#[test]
fn threads_are_within_reason() {
    let most = if cfg!(feature = "rayon") { MAX_THREADS } else { 1 };
    for bad in ["0", "two", "100000", "-1"] {
        let message = format!("--threads: {bad}, but must be a whole number from 1 to {most}");
        assert_eq!(refusal(&format!("--threads {bad}")), message);
    }
}

#[test]
fn instruction_sets_are_listed() {
    let here: Vec<_> = Isa::available().map(Isa::name).collect();
    let here = here.join(", ");
    assert_eq!(refusal("--isa sse9"), format!("--isa: sse9 is unknown; this machine has {here}"));
    for name in Isa::known().filter(|name| Isa::from_name(name).is_none()) {
        let message = format!("--isa: {name} is not available; this machine has {here}");
        assert_eq!(refusal(&format!("--isa {name}")), message);
    }
}

#[test]
fn flags_of_the_fused_path_need_it() {
    assert_eq!(refusal("--only naive --isa portable"), "--isa: is about the fused path, but --only is naive");
    assert_eq!(refusal("--explain --only naive"), "--explain: is about the fused path, but --only is naive");
    assert_eq!(
        refusal("--precision exact --only unfused"),
        "--precision: is about the fused path, but --only is unfused"
    );
    assert_eq!(refusal("--output o --only unfused"), "--output: is about the fused path, but --only is unfused");
}

#[test]
fn flags_that_need_another_say_so() {
    let needs = "needs --output, where they are written, but there is none";
    assert_eq!(refusal("--weights"), format!("--weights: {needs}"));
    assert_eq!(refusal("--scores raw"), format!("--scores: {needs}"));
    assert_eq!(refusal("--scores raw --output o --scores raw"), "--scores: raw is given twice");
    let forward = "is about the forward pass, but got --backward too";
    assert_eq!(refusal("--backward --precision native"), format!("--precision: {forward}"));
    assert_eq!(refusal("--explain --json"), "--explain: goes with the table, but got --json too");
}

fn swept(line: &str) -> (Args, Sweep) {
    match parse_words(line) {
        Ok(Command::Sweep(args, sweep)) => (*args, sweep),
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn a_sweep_has_a_folder_lengths_and_sizes() {
    let (args, sweep) = swept("--sweep");
    assert_eq!(sweep, Sweep::new(None, None, None));
    assert_eq!((sweep.lengths.first(), sweep.lengths.last(), sweep.lengths.len()), (Some(&16), Some(&16384), 11));
    assert_eq!((sweep.dims, sweep.folder), (vec![32, 64, 128, 256], PathBuf::from("target/pictures")));
    assert_eq!((args.only, args.isa, args.threads), (None, None, None));
    let (args, sweep) = swept("--dims 64,7 --sweep here --lengths=300,16,300 --only fused --isa portable --repeat 2");
    assert_eq!((sweep.lengths, sweep.dims), (vec![16, 300], vec![7, 64]));
    assert_eq!((sweep.folder, args.source), (PathBuf::from("here"), Source::Paragraph));
    assert_eq!((args.only, args.repeat), (Some(Only::Fused), NonZeroUsize::new(2)));
    assert_eq!(swept("--sweep=here").1.folder, PathBuf::from("here"));
    let args = swept("--sweep --dtype bf16 --precision native").0;
    assert_eq!((args.dtype, args.settings.precision), (Some(Dtype::Bf16), Precision::Native));
}

#[test]
fn flags_of_one_call_do_not_sweep() {
    for flag in ["--causal", "--weights", "--explain", "--json", "--scale 1", "--output o", "--scores raw"] {
        let name = flag.split(' ').next().unwrap();
        assert_eq!(refusal(&format!("--sweep {flag}")), format!("{name}: is about one call, but --sweep makes many"));
    }
    assert_eq!(refusal("--sweep --shape 1,1,1,1,1,1,1"), "--shape: is about one call, but --sweep makes many");
    assert_eq!(refusal("--lengths 16"), "--lengths: needs --sweep, but there is none");
    assert_eq!(refusal("--dims 16"), "--dims: needs --sweep, but there is none");
    assert_eq!(refusal("--sweep=a b"), "one file at a time, but got a and b");
    assert_eq!(refusal("--sweep --only naive --isa portable"), "--isa: is about the fused path, but --only is naive");
    for (sizes, most) in [("--lengths 0", 65536), ("--lengths 16,", 65536), ("--dims a", 1024), ("--dims 1025", 1024)] {
        let expected = format!("but must be whole numbers from 1 to {most}, with commas between them");
        let (flag, value) = sizes.split_once(' ').unwrap();
        assert_eq!(refusal(&format!("--sweep {sizes}")), format!("{flag}: {value}, {expected}"));
    }
}

#[test]
fn a_message_is_one_line() {
    let message = parse(["a\nb".into(), "c\td".into()]).unwrap_err().to_string();
    assert_eq!(message, "one file at a time, but got a b and c d");
}
