//! The program without its `main`: the model's own embeddings where it is present, refusals everywhere.

use super::*;
use safetensors::SafeTensors;
use std::num::NonZeroUsize;
use std::path::Path;

#[path = "../../../tests/support/model_folder.rs"]
mod model_folder;
#[path = "../../../tests/support/temporary_folder.rs"]
mod temporary_folder;

use temporary_folder::TemporaryFolder;

/// Texts and their embeddings, as the model's own framework computed them.
fn recorded(file: &str, list: &str, tensor: &str) -> (Vec<String>, Vec<f32>) {
    let file = std::fs::read(model_folder::fixture(file)).unwrap();
    let (_, header) = SafeTensors::read_metadata(&file).unwrap();
    let texts = serde_json::from_str(&header.metadata().as_ref().unwrap()[list]).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let rows = tensors.tensor(tensor).unwrap();
    (texts, rows.data().as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect())
}

fn assert_recorded(texts: &[String], embedded: &Embedded, expected: &[f32]) {
    assert_eq!(embedded.rows.len(), expected.len());
    let width = expected.len() / texts.len();
    let mut worst = 0.0f32;
    for (text, (got, expected)) in texts.iter().zip(embedded.rows.chunks_exact(width).zip(expected.chunks_exact(width)))
    {
        let error = got.iter().zip(expected).fold(0.0f32, |most, (got, x)| most.max((got - x).abs()));
        assert!(error < 1e-5, "{text:?}: off by {error:e}");
        worst = worst.max(error);
    }
    complain(&format_args!("embeddings of {} texts off by {worst:e} at most", texts.len()));
}

#[test]
fn the_ten_texts_are_embedded_as_recorded_where_the_model_is_present() {
    let Some(folder) = model_folder::folder("the_ten_texts_are_embedded_as_recorded") else { return };
    let (texts, expected) = recorded("minilm_embeddings.safetensors", "texts", "embeddings");
    let encoder = Encoder::load(&folder, None).unwrap();
    let embedded = embed_all(&encoder, &texts).unwrap();
    assert_recorded(&texts, &embedded, &expected);
    assert_eq!(embedded.tokens, [11, 11, 268, 8, 11, 9, 12, 15, 8, 2]);
    assert_eq!((&embedded.cut[..], encoder.max_tokens()), (&[][..], 512), "recorded uncut");
    assert_eq!((embedded.long, encoder.made_for()), (1, Some(256)), "said by sentence_bert_config.json");
    let width = encoder.width();
    for (text, row) in texts.iter().zip(embedded.rows.chunks_exact(width)) {
        let alone = embed_all(&encoder, std::slice::from_ref(text)).unwrap();
        assert_eq!(alone.rows, row, "{text:?} alone");
    }

    let (words, expected) = recorded("words.safetensors", "words", "vectors");
    assert_recorded(&words, &embed_all(&encoder, &words).unwrap(), &expected);

    let cut = Encoder::load(&folder, NonZeroUsize::new(256)).unwrap();
    let cut = embed_all(&cut, &texts).unwrap();
    assert_eq!((&cut.cut[..], cut.long, cut.tokens[2]), (&[2][..], 0, 256));
    assert_eq!(cut.rows[..2 * width], embedded.rows[..2 * width]);
    for limit in [2, 513] {
        let refused = Encoder::load(&folder, NonZeroUsize::new(limit)).unwrap_err().to_string();
        assert_eq!(refused, format!("--max-tokens: {limit}, but must be from 3 to 512"));
    }
}

/// A folder with these files.
fn folder(name: &str, files: &[(&str, &str)]) -> TemporaryFolder {
    let folder = TemporaryFolder::new(&format!("embed-{name}"));
    files.iter().for_each(|(name, text)| std::fs::write(folder.file(name), text).unwrap());
    folder
}

#[test]
fn folders_that_are_no_model_are_refused_by_name() {
    let refusal = |folder: &Path| Encoder::load(folder, None).unwrap_err().to_string();
    let none = refusal(Path::new("/no/such/folder"));
    assert!(none.starts_with("/no/such/folder: no such folder. The model is in the Python package "), "{none}");
    let config = r#"{"model_type": "bert", "vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1,
        "num_attention_heads": 3, "intermediate_size": 8, "max_position_embeddings": 7}"#;
    for (name, files, file, why) in [
        ("empty", &[][..], "config.json", ""),
        ("half", &[("config.json", config)], "model.safetensors", ""),
        (
            "contradiction",
            &[("config.json", config), ("model.safetensors", "")],
            "",
            "configuration: num_attention_heads is 3, but must be a divisor of hidden_size, which is 4",
        ),
    ] {
        let folder = folder(name, files);
        let refused = refusal(folder.path());
        let at = if file.is_empty() { folder.path().to_owned() } else { folder.file(file) };
        assert!(refused.starts_with(&format!("{}: {why}", at.display())), "{refused}");
    }
}

#[test]
fn lines_of_a_file_follow_the_texts_given() {
    let folder = folder("lines", &[("texts", "b\n\nc\n")]);
    let file = folder.file("texts");
    assert_eq!(texts(vec!["a".to_owned()], Some(&file)).unwrap(), ["a", "b", "", "c"]);
    assert_eq!(texts(vec![], Some(&file)).unwrap(), ["b", "", "c"]);
    assert_eq!(texts(vec![], None).unwrap(), TEXTS);
    assert!(texts(vec![], Some(folder.path())).unwrap_err().to_string().ends_with(": not a file"));
    std::fs::write(&file, [0xff]).unwrap();
    assert!(texts(vec![], Some(&file)).unwrap_err().to_string().contains("invalid utf-8"));
}
