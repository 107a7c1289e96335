//! ONNX Attention, opsets 23 to 25, in terms of the public API.

use crate::cases::{Data, Tensor};
use crate::node::Node;
use sdpa::{Alignment, Attention, Exec, Inputs, Isa, Mask, Outputs, Point, View, ViewMut, Window};

const ATTRIBUTES: [&str; 9] = [
    "is_causal",
    "kv_num_heads",
    "left_window_size",
    "q_num_heads",
    "qk_matmul_output_mode",
    "right_window_size",
    "scale",
    "softcap",
    "softmax_precision",
];

/// A `[batch, heads, rows, dim]` tensor, stored so or (ONNX's 3-D form) batch, rows, heads, dim.
struct Heads {
    data: Vec<f32>,
    shape: [usize; 4],
    rows_first: bool,
}

impl Heads {
    /// An output for these queries, in their own layout.
    fn output<'a>(&self, y: &'a mut [f32], value_dim: usize) -> Result<ViewMut<'a>, String> {
        let [b, h, l, _] = self.shape;
        let view = match self.rows_first {
            true => ViewMut::blhd(y, [b, l, h, value_dim]),
            false => ViewMut::bhld(y, [b, h, l, value_dim]),
        };
        view.map_err(|e| e.to_string())
    }

    fn new(tensor: &Tensor, heads: Option<i64>) -> Result<Self, String> {
        let data = tensor.f32s()?;
        let heads = heads.map(|n| usize::try_from(n).map_err(|_| format!("{n} heads"))).transpose()?;
        match (tensor.shape.as_slice(), heads) {
            (&[b, h, l, d], heads) if heads.is_none_or(|n| n == h) => {
                Ok(Self { data, shape: [b, h, l, d], rows_first: false })
            }
            (&[b, l, hidden], Some(h)) if h > 0 && hidden % h == 0 => {
                Ok(Self { data, shape: [b, h, l, hidden / h], rows_first: true })
            }
            (shape, heads) => Err(format!("shape {shape:?} with {heads:?} heads")),
        }
    }

    fn view(&self) -> Result<View<'_>, String> {
        let [b, h, l, d] = self.shape;
        let view =
            if self.rows_first { View::blhd(&self.data, [b, l, h, d]) } else { View::bhld(&self.data, self.shape) };
        view.map_err(|e| e.to_string())
    }

    /// These rows after those of the past, stored `[batch, heads, rows, dim]`.
    fn after(&self, past: Option<&Tensor>) -> Result<Self, String> {
        let [b, h, l, d] = self.shape;
        let past = match past {
            Some(past) => Self::new(past, Some(h as i64))?,
            None => Self { data: Vec::new(), shape: [b, h, 0, d], rows_first: false },
        };
        if past.rows_first || (past.shape[0], past.shape[3]) != (b, d) {
            return Err(format!("past of shape {:?} before {:?}", past.shape, self.shape));
        }
        let view = self.view()?;
        let before = past.shape[2];
        let mut data = Vec::with_capacity(b * h * (before + l) * d);
        for (i, j) in (0..b).flat_map(|i| (0..h).map(move |j| (i, j))) {
            data.extend(&past.data[(i * h + j) * before * d..][..before * d]);
            let rows = (0..l).flat_map(|row| (0..d).map(move |n| [i, j, row, n]));
            data.extend(rows.map(|at| *view.get(at).expect("inside the shape")));
        }
        Ok(Self { data, shape: [b, h, before + l, d], rows_first: false })
    }
}

/// Runs a node; the largest error found.
pub(crate) fn run(node: &Node<'_>) -> Result<f64, String> {
    node.knows(&ATTRIBUTES, 7, 4)?;
    node.check_softmax_precision()?;
    let (q_heads, kv_heads) = (node.int("q_num_heads")?, node.int("kv_num_heads")?);
    let q = Heads::new(node.needed(0)?, q_heads)?;
    let (new_k, new_v) = (Heads::new(node.needed(1)?, kv_heads)?, Heads::new(node.needed(2)?, kv_heads)?);
    let (past_k, past_v) = past(node)?;
    let (k, v) = (new_k.after(past_k)?, new_v.after(past_v)?);
    let mut worst = node.check(1, "present_key", &k.data, &k.shape)?;
    worst = worst.max(node.check(2, "present_value", &v.data, &v.shape)?);

    let past = k.shape[2] - new_k.shape[2];
    let nonpad = node.input(6).map(Tensor::lengths).transpose()?;
    // Rows stand after the past; or, at the end of the keys that are no padding; or at key 0.
    let alignment = if nonpad.is_some() { Alignment::BottomRight } else { Alignment::Offset(past as isize) };
    let attention = settings(node)?.align(alignment);

    let ([b, h, l, _], [.., keys, _], [.., d]) = (q.shape, k.shape, v.shape);
    // Without a past, keys and values are read where they are, in the node's own layout.
    let mut inputs = match past {
        0 => Inputs::new(q.view()?, new_k.view()?, new_v.view()?),
        _ => Inputs::new(q.view()?, k.view()?, v.view()?),
    };
    let mask = node.input(3);
    let float_mask = mask.filter(|mask| mask.floats().is_ok()).map(Tensor::f32s).transpose()?;
    if let Some(mask) = mask {
        inputs = masked(inputs, mask, float_mask.as_deref())?;
    }
    let unpadded = inputs;
    if let Some(lens) = &nonpad {
        inputs = inputs.kv_lens(lens);
    }

    let point = point(node)?;
    for isa in Isa::available() {
        let (mut y, mut qk) = (vec![f32::NAN; b * h * l * d], vec![f32::NAN; b * h * l * keys]);
        let mut call = |inputs: Inputs<'_>, wants_qk: bool| -> Result<(), String> {
            let mut outputs = Outputs::new(q.output(&mut y, d)?);
            if wants_qk {
                outputs = outputs.scores(point, ViewMut::bhld(&mut qk, [b, h, l, keys]).map_err(|e| e.to_string())?);
            }
            let problem = attention.problem(inputs, outputs).map_err(|e| e.to_string())?;
            problem.run_once(Exec::serial().isa(isa));
            Ok(())
        };
        let wants_qk = node.output(3).is_some();
        if wants_qk && nonpad.is_some() && matches!(point, Point::Raw | Point::Softcapped) {
            // ONNX has padding hide keys like any mask, after these scores are out; the library's lengths say that the
            // keys do not exist. So the scores are those of the keys without lengths.
            call(unpadded, true)?;
            call(inputs, false)?;
        } else {
            call(inputs, wants_qk)?;
        }
        let shape = if q.rows_first { vec![b, l, h * d] } else { vec![b, h, l, d] };
        worst = worst.max(node.check(0, &format!("{isa}: Y"), &y, &shape)?);
        worst = worst.max(node.check(3, &format!("{isa}: qk_matmul_output"), &qk, &[b, h, l, keys])?);
    }
    Ok(worst)
}

/// The keys and values before the new ones: both, or neither, and then only without lengths.
fn past<'a>(node: &Node<'a>) -> Result<(Option<&'a Tensor>, Option<&'a Tensor>), String> {
    let (past_k, past_v) = (node.input(4), node.input(5));
    if past_k.is_some() != past_v.is_some() {
        return Err("one of past_key and past_value without the other".into());
    }
    if past_k.is_some() && node.input(6).is_some() {
        return Err("past_key and nonpad_kv_seqlen exclude each other".into());
    }
    Ok((past_k, past_v))
}

/// What the mask hides or adds; `bias` is the mask in f32, if it is one of numbers.
fn masked<'a>(inputs: Inputs<'a>, mask: &'a Tensor, bias: Option<&'a [f32]>) -> Result<Inputs<'a>, String> {
    let shape = mask.shape4()?;
    Ok(match (&mask.data, bias) {
        (Data::Bool(keep), _) => inputs.mask_prefix(Mask::keep(View::bhld(keep, shape).map_err(|e| e.to_string())?)),
        (_, Some(bias)) => inputs.bias_prefix(View::bhld(bias, shape).map_err(|e| e.to_string())?),
        _ => return Err(format!("attn_mask of {:?}", mask.dtype)),
    })
}

/// Which scores the node's fourth output is.
fn point(node: &Node<'_>) -> Result<Point, String> {
    match node.int("qk_matmul_output_mode")?.unwrap_or(0) {
        0 => Ok(Point::Raw),
        1 => Ok(Point::Softcapped),
        2 => Ok(Point::Masked),
        3 => Ok(Point::Weights),
        mode => Err(format!("qk_matmul_output_mode {mode}")),
    }
}

/// What the attributes say to compute.
fn settings(node: &Node<'_>) -> Result<Attention, String> {
    let mut attention = Attention::new();
    match node.int("is_causal")? {
        None | Some(0) => {}
        Some(1) => attention = attention.causal(),
        Some(other) => return Err(format!("is_causal {other}")),
    }
    if let Some(scale) = node.float("scale")? {
        attention = attention.scale(scale);
    }
    if let Some(c) = node.float("softcap")?.filter(|&c| c != 0.0) {
        attention = attention.softcap(c);
    }
    let side = |name: &str| match node.int(name)? {
        None | Some(-1) => Ok(None),
        Some(n) => usize::try_from(n).map(Some).map_err(|_| format!("{name} {n}")),
    };
    let (left, right) = (side("left_window_size")?, side("right_window_size")?);
    if left.is_some() || right.is_some() {
        attention = attention.window(Window::inclusive(left, right));
    }
    Ok(attention)
}
