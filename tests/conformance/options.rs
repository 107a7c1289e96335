//! Random combinations of options against float64 answers, on every instruction set. `SDPA_OPTION_CASES` names another
//! directory of such cases.

use crate::cases::{Case, Data, Outcome, Tensor, Tolerance, run_all};
use sdpa::{Alignment, Attention, Exec, Inputs, Isa, Mask, Outputs, View, ViewMut, Window};

/// Answers are of order 1 and in `f64`; the fused path works in `f32`.
const TOLERANCE: Tolerance = Tolerance { rtol: 2e-6, atol: 2e-6 };

const TENSORS: [&str; 10] =
    ["q", "k", "v", "bias", "mask", "sinks", "alibi_slopes", "kv_lens", "expected.out", "expected.lse"];

#[test]
fn options_agree_with_float64() {
    run_all("SDPA_OPTION_CASES", "tests/conformance/options", "args", run);
}

fn run(case: &Case) -> Result<Outcome, String> {
    if let Some(name) = case.tensors.keys().find(|name| !TENSORS.contains(&name.as_str())) {
        return Err(format!("unknown tensor '{name}'"));
    }
    let args: Vec<String> = serde_json::from_value(case.metadata.clone()).map_err(|e| e.to_string())?;
    let attention = parse(&args)?;
    let read = |tensor: &Tensor| -> Result<_, String> { Ok((tensor.f32s()?, tensor.shape4()?)) };
    let floats = |name: &str| case.tensors.get(name).map(read).transpose();
    let needed = |name: &str| floats(name)?.ok_or_else(|| format!("no tensor '{name}'"));
    let (q, k, v) = (needed("q")?, needed("k")?, needed("v")?);
    let (bias, sinks, slopes) = (floats("bias")?, floats("sinks")?, floats("alibi_slopes")?);
    let kv_lens = case.tensors.get("kv_lens").map(Tensor::lengths).transpose()?;

    let mut inputs = Inputs::new(dense(&q)?, dense(&k)?, dense(&v)?);
    if let Some(bias) = &bias {
        inputs = inputs.bias(dense(bias)?);
    }
    if let Some(mask) = case.tensors.get("mask") {
        let Data::Bool(keep) = &mask.data else { return Err(format!("mask of {:?}", mask.dtype)) };
        inputs = inputs.mask(Mask::keep(View::bhld(keep, mask.shape4()?).map_err(|e| e.to_string())?));
    }
    if let Some((sinks, _)) = &sinks {
        inputs = inputs.sinks(sinks);
    }
    if let Some((slopes, _)) = &slopes {
        inputs = inputs.alibi(slopes);
    }
    if let Some(lens) = &kv_lens {
        inputs = inputs.kv_lens(lens);
    }

    let ([b, h, l, _], [.., d]) = (q.1, v.1);
    let (expected_out, expected_lse) = (case.tensor("expected.out")?, case.tensor("expected.lse")?);
    expected_out.expect_shape(&[b, h, l, d])?;
    expected_lse.expect_shape(&[b, h, l])?;
    let mut worst = 0.0f64;
    for isa in Isa::available() {
        // Whatever is not written stays NaN.
        let (mut out, mut lse) = (vec![f32::NAN; b * h * l * d], vec![f32::NAN; b * h * l]);
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [b, h, l, d]).map_err(|e| e.to_string())?)
            .lse(ViewMut::bhl(&mut lse, [b, h, l]).map_err(|e| e.to_string())?);
        attention.problem(inputs, outputs).map_err(|e| e.to_string())?.run_once(Exec::serial().isa(isa));
        for (what, got, expected) in [("out", &out, expected_out), ("lse", &lse, expected_lse)] {
            let got: Vec<f64> = got.iter().map(|&x| x.into()).collect();
            worst = worst.max(TOLERANCE.check(&format!("{isa}: {what}"), &got, expected)?);
        }
    }
    Ok(Outcome::Passed(worst))
}

fn dense((data, shape): &(Vec<f32>, [usize; 4])) -> Result<View<'_>, String> {
    View::bhld(data, *shape).map_err(|e| e.to_string())
}

/// The flags of the `compare` program that say what to compute.
fn parse(args: &[String]) -> Result<Attention, String> {
    fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
        text.parse().map_err(|_| format!("'{text}' is no number of the kind needed"))
    }
    let bound = |text: &str| if text == "-" { Ok(None) } else { number(text).map(Some) };
    let mut attention = Attention::new();
    let mut args = args.iter().map(String::as_str);
    while let Some(flag) = args.next() {
        if flag == "--causal" {
            attention = attention.causal();
            continue;
        }
        let value = args.next().ok_or_else(|| format!("'{flag}' is unknown or lacks its value"))?;
        attention = match (flag, value) {
            ("--scale", x) => attention.scale(number(x)?),
            ("--softcap", x) => attention.softcap(number(x)?),
            ("--align", "top-left") => attention.align(Alignment::TopLeft),
            ("--align", "bottom-right") => attention.align(Alignment::BottomRight),
            ("--align", n) => attention.align(Alignment::Offset(number(n)?)),
            ("--window", pair) => {
                let (left, right) = pair.split_once(',').ok_or_else(|| format!("window '{pair}' is no pair"))?;
                attention.window(Window::inclusive(bound(left)?, bound(right)?))
            }
            _ => return Err(format!("unknown flag '{flag}'")),
        };
    }
    Ok(attention)
}
