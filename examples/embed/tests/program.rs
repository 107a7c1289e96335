//! The `embed` program as its users meet it: what it prints, and its exit status.

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

#[path = "../../../tests/support/model_folder.rs"]
mod model_folder;
#[path = "../../../tests/support/mod.rs"]
mod support;
#[path = "../../../tests/support/temporary_folder.rs"]
mod temporary_folder;
#[path = "../../../layers/tests/support/tiny_bert.rs"]
mod tiny_bert;

use temporary_folder::TemporaryFolder;

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_embed")).args(args).output().expect("the program runs")
}

#[test]
fn refusals_are_one_line_on_standard_error_and_status_2() {
    for (args, message) in [
        (&["--model", "no/such/model", "a"][..], "no/such/model: no such folder. The model is in the Python package "),
        (&["--modle", "m"], "--modle: unknown flag; --help lists them, -- ends them"),
        (&["--threads", "0"], "--threads: 0, but must be a whole number from 1 to 1024"),
        (&["--model", "src"], "src/config.json: "),
    ] {
        let output = run(args);
        let error = String::from_utf8(output.stderr).unwrap();
        let error = error.replace('\\', "/");
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.starts_with(&format!("embed: {message}")) && error.lines().count() == 1, "{error}");
        assert!(output.stdout.is_empty());
    }
    let help = run(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
    assert!(help.stdout.starts_with(b"Embeds texts "));
}

/// A tokenizer of some words, with these models and post-processors in their places.
fn tokenizer(model: &str, post_processor: &str) -> String {
    format!(
        r#"{{"version": "1.0", "added_tokens": [], "pre_tokenizer": {{"type": "Whitespace"}}, "model": {model},
            "post_processor": {post_processor}}}"#
    )
}

/// A folder with a BERT of random weights.
fn tiny_model(folder: &TemporaryFolder) -> PathBuf {
    let model = tiny_bert::model();
    let bytes = |data: &[f32]| data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let tensors: Vec<_> = model.iter().map(|(name, (shape, data))| (name, shape.clone(), bytes(data))).collect();
    let view = |(name, shape, data)| (name, TensorView::new(Dtype::F32, shape, data).unwrap());
    let views = tensors.iter().map(|(name, shape, data)| view((name, shape.clone(), data)));
    let weights = safetensors::serialize(views, None).unwrap();
    std::fs::write(folder.file("config.json"), tiny_bert::JSON).unwrap();
    std::fs::write(folder.file("model.safetensors"), weights).unwrap();
    folder.file("")
}

/// The tokenizers' library takes some files for tokenizers and panics, when it reads them or at the first text.
#[test]
fn tokenizers_at_which_the_library_panics_are_refused() {
    const WORDS: &str = r#"{"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2}, "unk_token": "[UNK]"}"#;
    const NOTHING: &str = r#"{"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [], "special_tokens": {}}"#;
    let folder = TemporaryFolder::new("embed-panics");
    let model = tiny_model(&folder);
    let embed = |tokenizer: &str| {
        std::fs::write(folder.file("tokenizer.json"), tokenizer).unwrap();
        run(&["--model", model.to_str().unwrap(), "--threads", "2", "a b", "b", "a"])
    };
    let good = embed(&tokenizer(WORDS, NOTHING));
    assert_eq!(good.status.code(), Some(0), "{}", String::from_utf8_lossy(&good.stderr));

    let merges_beyond = r#"{"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}"#;
    let unknown_special = NOTHING.replace("[{", r#"[{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"#);
    for (what, bad) in [
        ("a merge longer than every token", tokenizer(merges_beyond, NOTHING)),
        ("a template of an unknown token", tokenizer(WORDS, &unknown_special)),
    ] {
        let refused = embed(&bad);
        let said = String::from_utf8(refused.stderr).unwrap();
        assert_eq!((refused.status.code(), said.lines().count()), (Some(2), 1), "{what}: {said}");
        let file = Path::new(&model).join("tokenizer.json");
        let start = format!("embed: {}: the tokenizers library panics: ", file.display());
        assert!(said.starts_with(&start), "{what}: {said}");
        assert_eq!(refused.stdout, b"", "{what}");
    }
}

#[test]
fn texts_are_compared_where_the_model_is_present() {
    let Some(folder) = model_folder::folder("texts_are_compared") else { return };
    let folder = folder.to_str().unwrap();
    let table = run(&["--model", folder, "--threads", "1", "The dog barks.", "A dog is barking.", ""]);
    let (out, error) = (String::from_utf8(table.stdout).unwrap(), String::from_utf8(table.stderr).unwrap());
    assert_eq!(table.status.code(), Some(0), "{error}");
    let rows: Vec<Vec<f32>> = out.lines().skip(1).map(|line| cosines(line, 3)).collect();
    assert!(rows[0][1] > 0.8 && rows[0][2] < 0.5, "{out}");
    assert!(rows.iter().enumerate().all(|(i, row)| row[i] == 1.0), "{out}");
    assert!(error.starts_with("embed: 3 texts, ") && error.contains(" on 1 thread(s): "), "{error}");

    let json = run(&["--model", folder, "--max-tokens=5", "--json", "one two three four five", "one"]);
    let lines: Vec<serde_json::Value> =
        String::from_utf8(json.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.iter().map(|line| &line["tokens"]).collect::<Vec<_>>(), [5, 3]);
    assert_eq!(lines.iter().map(|line| &line["cut"]).collect::<Vec<_>>(), [true, false]);
    assert_eq!(lines[0]["embedding"].as_array().unwrap().len(), 384);
    let error = String::from_utf8(json.stderr).unwrap();
    assert!(error.contains("1 of 2 texts had more than 5 tokens and were cut to that"), "{error}");
}

/// The numbers of a row of the table, after its own.
fn cosines(line: &str, count: usize) -> Vec<f32> {
    line.split_whitespace().skip(1).take(count).map(|x| x.parse().unwrap()).collect()
}
