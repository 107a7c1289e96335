//! The translator as its users meet it: sentences that it was not trained on, words that it does not know.

use crate::temporary_folder::TemporaryFolder;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| crate::program::build("translate"));

/// Runs it with standard input, elsewhere than here.
fn run(folder: &TemporaryFolder, args: &[&str], input: &str) -> Output {
    let mut command = Command::new(&*PROGRAM);
    command.args(args).current_dir(folder.file(""));
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut program = piped.spawn().expect("the program runs");
    // A program that does not read its input has closed it.
    let _ = program.stdin.take().expect("a pipe").write_all(input.as_bytes());
    program.wait_with_output().expect("the program ends")
}

/// Translations that it prints.
fn translations(folder: &TemporaryFolder, args: &[&str], input: &str) -> Vec<String> {
    let ran = run(folder, args, input);
    assert_eq!(ran.status.code(), Some(0), "{}", String::from_utf8_lossy(&ran.stderr));
    let printed = String::from_utf8(ran.stdout).expect("UTF-8");
    printed.lines().filter_map(|line| line.strip_prefix("→ ")).map(str::to_owned).collect()
}

#[test]
fn sentences_are_translated() {
    let folder = TemporaryFolder::new("translate");
    let built_in = [
        "j'aime aller au parc et jouer",
        "ma sœur et mes amis sont très heureux",
        "la belle femme ne veut pas de pomme rouge",
        "nous choisissons souvent quatre-vingt-une petites fleurs blanches",
        "ce vieil hôpital est très calme",
        "sept mille quatre cent quatre-vingt-un",
    ];
    assert_eq!(translations(&folder, &[], ""), built_in);
    for name in ["translate.png", "translate.svg"] {
        assert!(folder.file("target/pictures").join(name).exists(), "{name}");
    }
    let texts = [
        ("He doesn't see the white horses.", "il ne voit pas les chevaux blancs"),
        ("An old man is strange!", "un vieil homme est étrange"),
        ("two thousand eight hundred", "deux mille huit cents"),
    ];
    let lines: String = texts.iter().map(|(english, _)| format!("{english}\n")).collect();
    assert_eq!(translations(&folder, &["-"], &lines), texts.map(|(_, french)| french));
    for (english, french) in texts {
        // With quotes, and without.
        assert_eq!(translations(&folder, &[english], ""), [french]);
        assert_eq!(translations(&folder, &english.split(' ').collect::<Vec<_>>(), ""), [french]);
    }
}

#[test]
fn unknown_words_are_named() {
    let folder = TemporaryFolder::new("translate-words");
    let refused = run(&folder, &["I", "like", "xylophones"], "");
    let said = String::from_utf8(refused.stderr).expect("UTF-8");
    assert_eq!((refused.status.code(), said.lines().count()), (Some(2), 1), "{said}");
    assert!(said.starts_with("translate: \"xylophones\": not among the "), "{said}");
    assert!(said.ends_with(" English words that were learned; --words lists them\n"), "{said}");
    assert!(refused.stdout.is_empty());

    let listed = run(&folder, &["--words"], "");
    let listed = String::from_utf8(listed.stdout).expect("UTF-8");
    let words: Vec<&str> = listed.split_whitespace().collect();
    assert!(words.len() > 200 && words.contains(&"park") && !words.contains(&"xylophones"), "{listed}");

    let refused = run(&folder, &["--quick"], "");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!((refused.status.code(), &*said), (Some(2), "translate: --quick: unknown flag; --help lists them\n"));
    let help = String::from_utf8(run(&folder, &["--help"], "").stdout).expect("UTF-8");
    assert!(help.contains("\nUsage: translate [OPTIONS] [TEXT]...\n"), "{help}");
}

/// Texts longer than the positions that it has learned are refused, not cut.
#[test]
fn long_texts_are_refused() {
    let folder = TemporaryFolder::new("translate-long");
    let ran = run(&folder, &["and "; 70], "");
    let said = String::from_utf8(ran.stderr).expect("UTF-8");
    assert_eq!(ran.status.code(), Some(2), "{said}");
    assert_eq!(said, "translate: a sentence has 70 words, but at most 63 fit\n");
}
