//! Gradients of random combinations of options against float64 answers, on every instruction set and by the oracle.
//! `SDPA_BACKWARD_CASES` names another directory of such cases.

use crate::cases::{Case, Outcome, Tolerance, run_all};
use crate::options::{Call, dense, floats, needed};
use sdpa::{Exec, Gradients, Isa, Mods, Saved, View, ViewMut, naive};

/// Answers are in `f64`; the fused path works in `f32`, on sums over rows as well as over keys.
const TOLERANCE: Tolerance = Tolerance { rtol: 1e-5, atol: 1e-5 };
/// The oracle works in `f64`, on numbers that were rounded to `f32`.
const ORACLE: Tolerance = Tolerance { rtol: 1e-9, atol: 1e-9 };

/// Gradients by the names of their expected values.
const NAMES: [&str; 6] = ["dq", "dk", "dv", "dbias", "dsinks", "dalibi_slopes"];

#[test]
fn gradients_agree_with_float64() {
    run_all("SDPA_BACKWARD_CASES", "tests/conformance/backward", "args", run);
}

fn run(case: &Case) -> Result<Outcome, String> {
    let call = Call::read(case)?;
    let (d_out, d_lse) = (needed(case, "d_out")?, floats(case, "d_lse")?);
    let d_lse = d_lse.as_ref().map(|(d_lse, _)| rows(d_lse, &call)).transpose()?;
    let inputs = call.inputs()?;
    let oracle = naive::gradients::<f64, _, _, _>(&call.attention, &inputs, dense(&d_out)?, d_lse, &Mods::new())
        .map_err(|e| e.to_string())?;
    let naive::Gradient { q, k, v, bias, sinks, slopes, .. } = oracle;
    check(case, "oracle", &[q, k, v, bias, sinks, slopes], ORACLE)?;
    let mut worst = 0.0f64;
    for isa in Isa::available() {
        let [out, lse] = call.forward(isa)?;
        let out = View::bhld(&out, call.out_shape()).map_err(|e| e.to_string())?;
        let mut saved = Saved::new(out, rows(&lse, &call)?, dense(&d_out)?);
        saved = d_lse.map_or(saved, |d_lse| saved.d_lse(d_lse));
        let got = fused(&call, saved, isa)?;
        worst = worst.max(check(case, &isa.to_string(), &got, TOLERANCE)?);
    }
    Ok(Outcome::Passed(worst))
}

/// One number a row.
fn rows<'a>(data: &'a [f32], call: &Call) -> Result<View<'a>, String> {
    let [b, h, l, _] = call.out_shape();
    View::bhld(data, [b, h, l, 1]).map_err(|e| e.to_string())
}

/// Every gradient that the call has, in the order of [`NAMES`]. Whatever is not written stays NaN.
fn fused(call: &Call, saved: Saved<'_>, isa: Isa) -> Result<[Vec<f64>; 6], String> {
    let blank = |x: Option<&[f32]>| vec![f32::NAN; x.map_or(0, <[f32]>::len)];
    let of = |x: &Option<(Vec<f32>, [usize; 4])>| blank(x.as_ref().map(|(x, _)| &x[..]));
    let [mut q, mut k, mut v] = [&call.q, &call.k, &call.v].map(|(x, _)| blank(Some(x)));
    let (mut bias, mut sinks, mut slopes) = (of(&call.bias), of(&call.sinks), of(&call.slopes));
    fn view(data: &mut [f32], shape: [usize; 4]) -> Result<ViewMut<'_>, String> {
        ViewMut::bhld(data, shape).map_err(|e| e.to_string())
    }
    let mut gradients = Gradients::new().q(view(&mut q, call.q.1)?).k(view(&mut k, call.k.1)?);
    gradients = gradients.v(view(&mut v, call.v.1)?);
    if let Some((_, shape)) = call.bias {
        gradients = gradients.bias(view(&mut bias, shape)?);
    }
    if call.sinks.is_some() {
        gradients = gradients.sinks(&mut sinks);
    }
    if call.slopes.is_some() {
        gradients = gradients.alibi(&mut slopes);
    }
    let problem = call.attention.backward(call.inputs()?, saved, gradients).map_err(|e| e.to_string())?;
    problem.run_once(Exec::serial().isa(isa)).map_err(|e| e.to_string())?;
    Ok([q, k, v, bias, sinks, slopes].map(|x| x.into_iter().map(f64::from).collect()))
}

/// Compares the gradients that the case expects; returns the largest difference.
fn check(case: &Case, what: &str, got: &[Vec<f64>; 6], tolerance: Tolerance) -> Result<f64, String> {
    let mut worst = 0.0f64;
    for (name, got) in NAMES.into_iter().zip(got) {
        if let Some(expected) = case.tensors.get(&format!("expected.{name}")) {
            worst = worst.max(tolerance.check(&format!("{what}: {name}"), got, expected)?);
        }
    }
    Ok(worst)
}
