//! Results have the same bits on every platform, so no library code takes elementary functions from the standard library:
//! those are the platform's own.

use crate::docs::sources;

/// How they are called. Square roots, fused products and rounding are exact, and so the same everywhere; `exp` of vectors
/// takes an argument and is the kernels' own.
const CALLS: [&str; 17] = [
    ".exp()",
    ".exp2()",
    ".exp_m1()",
    ".ln()",
    ".ln_1p()",
    ".log(",
    ".log2()",
    ".log10()",
    ".powf(",
    ".sin()",
    ".cos()",
    ".tan()",
    ".sin_cos()",
    ".atan()",
    ".atan2(",
    ".tanh()",
    ".cosh()",
];

/// Oracle, whose `f64` is rounded to `f32` by whoever compares.
const ORACLE: &str = "src/naive";

/// The line without its comment, and with paths of functions as methods: `f64::sin` is `.sin()`.
fn code(line: &str) -> String {
    let code = line.split("//").next().unwrap_or_default();
    let mut code = code.replace("f32::", "f64::");
    while let Some(at) = code.find("f64::") {
        let name: String = code[at + 5..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        code.replace_range(at..at + 5 + name.len(), &format!(".{name}()"));
    }
    code
}

#[test]
fn elementary_functions_are_our_own() {
    assert!(CALLS.iter().any(|call| code("angles.map(f64::sin)").contains(call)));
    let mut found = Vec::new();
    for folder in ["src", "kernels/src", "layers/src"] {
        let files = sources(folder, "rs");
        assert!(files.len() > 20, "{folder}: files were missed");
        for (path, text) in files {
            let path = path.strip_prefix(env!("CARGO_MANIFEST_DIR")).expect("a file of the repository");
            let name = path.to_str().expect("UTF-8").replace('\\', "/");
            if name.starts_with(ORACLE) || name.contains("tests") {
                continue;
            }
            let library = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            for (number, line) in (1..).zip(library.lines()) {
                let calls = CALLS.iter().filter(|call| code(line).contains(**call));
                found.extend(calls.map(|call| format!("{name}:{number}: {call}")));
            }
        }
    }
    assert!(found.is_empty(), "take these from `elementary.rs` of the kernels: {found:#?}");
}
