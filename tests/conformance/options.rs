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

/// Elements of a tensor, and its shape with ones in front.
type Floats = (Vec<f32>, [usize; 4]);

/// A call as a case describes it.
pub(crate) struct Call {
    pub(crate) attention: Attention,
    pub(crate) q: Floats,
    pub(crate) k: Floats,
    pub(crate) v: Floats,
    pub(crate) bias: Option<Floats>,
    pub(crate) sinks: Option<Floats>,
    pub(crate) slopes: Option<Floats>,
    mask: Option<(Vec<bool>, [usize; 4])>,
    kv_lens: Option<Vec<usize>>,
}

/// The floats of a tensor, if the case has it.
pub(crate) fn floats(case: &Case, name: &str) -> Result<Option<Floats>, String> {
    let read = |tensor: &Tensor| -> Result<_, String> { Ok((tensor.f32s()?, tensor.shape4()?)) };
    case.tensors.get(name).map(read).transpose()
}

/// The floats of a tensor that the case must have.
pub(crate) fn needed(case: &Case, name: &str) -> Result<Floats, String> {
    floats(case, name)?.ok_or_else(|| format!("no tensor '{name}'"))
}

impl Call {
    pub(crate) fn read(case: &Case) -> Result<Self, String> {
        let args: Vec<String> = serde_json::from_value(case.metadata.clone()).map_err(|e| e.to_string())?;
        let mask = |tensor: &Tensor| match &tensor.data {
            Data::Bool(keep) => Ok((keep.clone(), tensor.shape4()?)),
            _ => Err(format!("mask of {:?}", tensor.dtype)),
        };
        Ok(Self {
            attention: parse(&args)?,
            q: needed(case, "q")?,
            k: needed(case, "k")?,
            v: needed(case, "v")?,
            bias: floats(case, "bias")?,
            sinks: floats(case, "sinks")?,
            slopes: floats(case, "alibi_slopes")?,
            mask: case.tensors.get("mask").map(mask).transpose()?,
            kv_lens: case.tensors.get("kv_lens").map(Tensor::lengths).transpose()?,
        })
    }

    pub(crate) fn inputs(&self) -> Result<Inputs<'_>, String> {
        let mut inputs = Inputs::new(dense(&self.q)?, dense(&self.k)?, dense(&self.v)?);
        if let Some(bias) = &self.bias {
            inputs = inputs.bias(dense(bias)?);
        }
        if let Some((keep, shape)) = &self.mask {
            inputs = inputs.mask(Mask::keep(View::bhld(keep, *shape).map_err(|e| e.to_string())?));
        }
        if let Some((sinks, _)) = &self.sinks {
            inputs = inputs.sinks(sinks);
        }
        if let Some((slopes, _)) = &self.slopes {
            inputs = inputs.alibi(slopes);
        }
        Ok(self.kv_lens.as_ref().map_or(inputs, |lens| inputs.kv_lens(lens)))
    }

    /// The shape of the output.
    pub(crate) fn out_shape(&self) -> [usize; 4] {
        let ([b, h, l, _], [.., d]) = (self.q.1, self.v.1);
        [b, h, l, d]
    }

    /// Output and log-sum-exp on an instruction set. Whatever is not written stays NaN.
    pub(crate) fn forward(&self, isa: Isa) -> Result<[Vec<f32>; 2], String> {
        let [b, h, l, d] = self.out_shape();
        let (mut out, mut lse) = (vec![f32::NAN; b * h * l * d], vec![f32::NAN; b * h * l]);
        let outputs = Outputs::new(ViewMut::bhld(&mut out, [b, h, l, d]).map_err(|e| e.to_string())?)
            .lse(ViewMut::bhl(&mut lse, [b, h, l]).map_err(|e| e.to_string())?);
        let problem = self.attention.problem(self.inputs()?, outputs).map_err(|e| e.to_string())?;
        problem.run_once(Exec::serial().isa(isa));
        Ok([out, lse])
    }
}

fn run(case: &Case) -> Result<Outcome, String> {
    if let Some(name) = case.tensors.keys().find(|name| !TENSORS.contains(&name.as_str())) {
        return Err(format!("unknown tensor '{name}'"));
    }
    let call = Call::read(case)?;
    let [b, h, l, d] = call.out_shape();
    let (expected_out, expected_lse) = (case.tensor("expected.out")?, case.tensor("expected.lse")?);
    expected_out.expect_shape(&[b, h, l, d])?;
    expected_lse.expect_shape(&[b, h, l])?;
    let mut worst = 0.0f64;
    for isa in Isa::available() {
        let [out, lse] = call.forward(isa)?;
        for (what, got, expected) in [("out", &out, expected_out), ("lse", &lse, expected_lse)] {
            let got: Vec<f64> = got.iter().map(|&x| x.into()).collect();
            worst = worst.max(TOLERANCE.check(&format!("{isa}: {what}"), &got, expected)?);
        }
    }
    Ok(Outcome::Passed(worst))
}

pub(crate) fn dense((data, shape): &Floats) -> Result<View<'_>, String> {
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
