//! What is printed.

use crate::encoder::Embedded;
use std::fmt::Write as _;

/// Texts compared each with each.
const COMPARED: usize = 12;
/// Texts shown of those nearest to the first.
const NEAREST: usize = 10;
/// Characters shown of a text.
const SHOWN: usize = 60;

/// How similar the texts are: a table of cosines, or those nearest to the first.
pub(crate) fn similarities(texts: &[String], embedded: &Embedded, width: usize) -> String {
    let rows: Vec<&[f32]> = embedded.rows.chunks_exact(width).collect();
    if rows.len() > COMPARED { nearest(texts, &rows) } else { table(texts, &rows) }
}

/// Of rows of length 1.
fn cosine(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn table(texts: &[String], rows: &[&[f32]]) -> String {
    let mut out = String::from("   ");
    (1..=rows.len()).for_each(|j| _ = write!(out, "{j:>6}"));
    out.push('\n');
    for (i, (text, row)) in texts.iter().zip(rows).enumerate() {
        let _ = write!(out, "{:>3}", i + 1);
        rows.iter().for_each(|other| _ = write!(out, "{:>6.2}", cosine(row, other)));
        let _ = writeln!(out, "  {}", short(text));
    }
    out
}

fn nearest(texts: &[String], rows: &[&[f32]]) -> String {
    let mut others: Vec<(f32, usize)> = (1..rows.len()).map(|i| (cosine(rows[0], rows[i]), i)).collect();
    others.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut out = format!("nearest to {}\n", short(&texts[0]));
    for &(cosine, i) in others.iter().take(NEAREST) {
        let _ = writeln!(out, "{cosine:>6.2}  {}", short(&texts[i]));
    }
    out
}

/// The beginning of a text, on one line.
fn short(text: &str) -> String {
    let mut line: String = text.chars().take(SHOWN).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(SHOWN).is_some() {
        line.push('…');
    }
    format!("{line:?}").replace("\\\"", "\"")
}

/// One JSON object for each text.
pub(crate) fn json(texts: &[String], embedded: &Embedded, width: usize) -> String {
    let rows = embedded.rows.chunks_exact(width);
    let mut cut = embedded.cut.iter().peekable();
    let lines = texts.iter().zip(rows).zip(&embedded.tokens).enumerate().map(|(i, ((text, row), tokens))| {
        let cut = cut.next_if_eq(&&i).is_some();
        serde_json::json!({ "text": text, "tokens": tokens, "cut": cut, "embedding": row }).to_string() + "\n"
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_texts_are_one_line() {
        assert_eq!(short("a\nb"), "\"a b\"");
        assert_eq!(short(&"ä".repeat(61)), format!("\"{}…\"", "ä".repeat(60)));
    }

    #[test]
    fn many_texts_are_ranked() {
        let texts: Vec<String> = (0..13).map(|i| format!("t{i}")).collect();
        let rows = (0..13).flat_map(|i| [(i as f32 / 9.0).cos(), (i as f32 / 9.0).sin()]).collect();
        let embedded = Embedded { rows, tokens: vec![1; 13], cut: vec![2], long: 0 };
        let text = similarities(&texts, &embedded, 2);
        assert!(text.starts_with("nearest to \"t0\"\n  0.99  \"t1\"\n"), "{text}");
        assert_eq!(text.lines().count(), 11);
        let few = Embedded { rows: embedded.rows[..4].to_vec(), ..Embedded::default() };
        assert_eq!(
            similarities(&texts[..2], &few, 2),
            "        1     2\n  1  1.00  0.99  \"t0\"\n  2  0.99  1.00  \"t1\"\n"
        );
        let line = json(&texts, &embedded, 2).lines().nth(2).map(str::to_owned).unwrap();
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&value["text"], &value["cut"]), (&"t2".into(), &true.into()));
    }
}
