//! tract: BERT in its operations, declared and optimised as a model that it loads.

use super::{Batch, Texts};
use crate::failure::Result;
use crate::peer::{Peer, on_matrix_unit};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs;
use tract_linalg::knobs::TRACT_AMX_BF16;
use tract_linalg::multithread::{Executor, set_default_executor};
use tract_nnef::internal::*;
use tract_nnef::tract_core::ops::array::{Gather, Slice};
use tract_nnef::tract_core::ops::binary::TypedBinOp;
use tract_nnef::tract_core::ops::einsum::EinSum;
use tract_nnef::tract_core::ops::math;
use tract_nnef::tract_core::ops::nn::gelu_exact::gelu_exact;
use tract_nnef::tract_core::ops::nn::{Reduce, Reducer, RmsNorm};
use tract_transformers::ops::sdpa::Sdpa;

/// Number that a mask adds to hide a token: [`FlashSdpaOp`](tract_transformers::ops::flash_sdpa::FlashSdpaOp) of −∞ may make NaN.
const HIDDEN: f32 = -1e30;

/// Beginning of the name of a peer whose products are to be of bf16.
const BF16: &str = "tract-bf16-";

/// The model, used in one of three ways.
pub(super) struct Bert {
    name: &'static str,
    ready: Option<Ready>,
    /// A row for each text.
    answer: Vec<f32>,
}

struct Ready {
    /// Places of texts, the model that they go through, and its inputs.
    batches: Vec<(Batch, Arc<TypedRunnableModel>, TVec<Tensor>)>,
    texts: usize,
    width: usize,
}

impl Bert {
    pub(super) fn new(name: &'static str) -> Self {
        Self { name, ready: None, answer: Vec::new() }
    }
}

impl Peer<Texts> for Bert {
    fn name(&self) -> &'static str {
        self.name
    }

    fn supports(&self, texts: &Texts) -> std::result::Result<(), String> {
        match texts.exact {
            true => Err("f32 only".to_owned()),
            false if self.name.starts_with(BF16) => on_matrix_unit(),
            false => Ok(()),
        }
    }

    fn prepare(&mut self, texts: &Texts) -> Result<String> {
        let (setting, products) = match self.name.starts_with(BF16) {
            true => (true, ", TRACT_AMX_BF16"),
            false => (false, ""),
        };
        TRACT_AMX_BF16.set(setting);
        // The pool that its attention uses, too.
        set_default_executor(if texts.threads == 1 { Executor::SingleThread } else { Executor::RayonGlobal });
        let (batches, how) = match self.name.rsplit('-').next() {
            Some("padded") => (&texts.batches.padded, "all texts in one batch, padded"),
            Some("sorted") => (&texts.batches.sorted, "eight texts at a time, sorted by length, padded"),
            _ => (&texts.batches.single, "one text at a time"),
        };
        let config: Config = serde_json::from_slice(&fs::read(texts.model.join("config.json"))?)?;
        let weights = fs::read(texts.model.join("model.safetensors"))?;
        let weights = SafeTensors::deserialize(&weights)?;
        let mut models = HashMap::new();
        let mut ready = Vec::new();
        for batch in batches {
            let tokens: Vec<&[u32]> = batch.iter().map(|&text| texts.tokens[text].as_slice()).collect();
            let padding = Padding::of(&tokens);
            let model = match models.entry(padding) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(unknown) => unknown.insert(Graph::new(config, &weights).runnable(padding)?),
            };
            ready.push((batch.clone(), Arc::clone(model), inputs(&tokens, padding)?));
        }
        self.ready = Some(Ready { batches: ready, texts: texts.tokens.len(), width: config.hidden_size });
        Ok(format!("BERT in its operations, Sdpa, optimised{products}, {how}"))
    }

    fn run(&mut self) -> Result<()> {
        let Ready { batches, texts, width } = self.ready.as_ref().ok_or("not prepared")?;
        self.answer.resize(texts * width, 0.0);
        for (batch, model, inputs) in batches {
            let outputs = model.run(inputs.iter().map(|input| input.clone().into_tvalue()).collect())?;
            let rows = outputs[0].to_plain_array_view::<f32>()?;
            let rows = rows.as_slice().ok_or("rows out of order")?;
            for (row, &text) in rows.chunks_exact(*width).zip(batch) {
                self.answer[text * width..][..*width].copy_from_slice(row);
            }
        }
        Ok(())
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        Ok(self.answer.clone())
    }
}

/// Padding of a batch, which there is if texts are shorter than the longest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Padding {
    None,
    Masked,
}

impl Padding {
    fn of(tokens: &[&[u32]]) -> Self {
        if tokens.windows(2).all(|pair| pair[0].len() == pair[1].len()) { Self::None } else { Self::Masked }
    }
}

/// Ids, the share of each token in the mean, both `[texts, tokens]`, and, if there is padding, the mask of attention.
fn inputs(tokens: &[&[u32]], padding: Padding) -> TractResult<TVec<Tensor>> {
    let longest = tokens.iter().map(|text| text.len()).max().unwrap_or(0);
    let places = || tokens.iter().flat_map(|text| (0..longest).map(move |j| (text, j)));
    let ids: Vec<i64> = places().map(|(text, j)| text.get(j).map_or(0, |&id| i64::from(id))).collect();
    let share = |(text, j): (&&[u32], usize)| if j < text.len() { 1.0 / text.len() as f32 } else { 0.0 };
    let shares: Vec<f32> = places().map(share).collect();
    let shape = [tokens.len(), longest];
    let mut inputs = tvec![Tensor::from_shape(&shape, &ids)?, Tensor::from_shape(&shape, &shares)?];
    if padding == Padding::Masked {
        let row = |text: &&[u32]| (0..longest).map(|j| if j < text.len() { 0.0 } else { HIDDEN }).collect::<Vec<f32>>();
        // Its attention wants a row of the mask for each query.
        let mask: Vec<f32> = tokens.iter().flat_map(|text| row(text).repeat(longest)).collect();
        inputs.push(Tensor::from_shape(&[tokens.len(), 1, longest, longest], &mask)?);
    }
    Ok(inputs)
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Config {
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    layer_norm_eps: f32,
}

/// A model that is being declared.
struct Graph<'a> {
    config: Config,
    weights: &'a SafeTensors<'a>,
    model: TypedModel,
}

impl<'a> Graph<'a> {
    fn new(config: Config, weights: &'a SafeTensors<'a>) -> Self {
        Self { config, weights, model: TypedModel::default() }
    }

    /// From [`inputs`] to embeddings `[texts, hidden]`, for any number of texts and tokens.
    fn runnable(mut self, padding: Padding) -> TractResult<Arc<TypedRunnableModel>> {
        let (texts, tokens) = (self.model.sym("B").to_dim(), self.model.sym("N").to_dim());
        let shape = tvec![texts.clone(), tokens.clone()];
        let ids = self.model.add_source("ids", i64::fact(shape.clone()))?;
        let shares = self.model.add_source("shares", f32::fact(shape))?;
        let mask = match padding {
            Padding::None => None,
            Padding::Masked => {
                let shape = tvec![texts, 1.to_dim(), tokens.clone(), tokens.clone()];
                Some(self.model.add_source("mask", f32::fact(shape))?)
            }
        };
        let mut x = self.embeddings(ids, tokens)?;
        for layer in 0..self.config.num_hidden_layers {
            let prefix = format!("encoder.layer.{layer}");
            let context = self.attention(x, mask, &format!("{prefix}.attention.self"))?;
            let context = self.linear(context, &format!("{prefix}.attention.output.dense"))?;
            let sum = self.wire(math::add(), &[x, context])?;
            x = self.norm(sum, &format!("{prefix}.attention.output.LayerNorm"))?;
            let wide = self.linear(x, &format!("{prefix}.intermediate.dense"))?;
            let wide = self.wire(gelu_exact(), &[wide])?;
            let narrow = self.linear(wide, &format!("{prefix}.output.dense"))?;
            let sum = self.wire(math::add(), &[x, narrow])?;
            x = self.norm(sum, &format!("{prefix}.output.LayerNorm"))?;
        }
        let mean = self.wire(EinSum::new("bn,bnh->bh".parse()?, f32::datum_type()), &[shares, x])?;
        // The root of the mean square is 1, the length that times √hidden.
        let normal = self.wire(RmsNorm { axis: 1, eps: tensor0(1e-12f32).into() }, &[mean])?;
        let shorter = self.number((self.config.hidden_size as f32).sqrt().recip())?;
        let out = self.wire(math::mul(), &[normal, shorter])?;
        self.model.select_output_outlets(&[out])?;
        self.model.into_optimized()?.into_runnable()
    }

    fn embeddings(&mut self, ids: OutletId, tokens: TDim) -> TractResult<OutletId> {
        let words = self.weight("embeddings.word_embeddings.weight")?;
        let words = self.wire(Gather::new(0), &[words, ids])?;
        let rows = |end| Slice { axis: 0, start: 0.to_dim(), end };
        let places = self.weight("embeddings.position_embeddings.weight")?;
        let places = self.wire(rows(tokens), &[places])?;
        let kind = self.weight("embeddings.token_type_embeddings.weight")?;
        let kind = self.wire(rows(1.to_dim()), &[kind])?;
        let sum = self.wire(math::add(), &[words, places])?;
        let sum = self.wire(math::add(), &[sum, kind])?;
        self.norm(sum, "embeddings.LayerNorm")
    }

    fn attention(&mut self, x: OutletId, mask: Option<OutletId>, name: &str) -> TractResult<OutletId> {
        let Config { hidden_size: hidden, num_attention_heads: heads, .. } = self.config;
        let (together, apart) = (tvec![hidden.to_dim()], tvec![heads.to_dim(), (hidden / heads).to_dim()]);
        let mut inputs: TVec<OutletId> = tvec![];
        for part in ["query", "key", "value"] {
            let rows = self.linear(x, &format!("{name}.{part}"))?;
            let rows = self.wire(AxisOp::Reshape(2, together.clone(), apart.clone()), &[rows])?;
            inputs.push(self.wire(AxisOp::Move(2, 1), &[rows])?);
        }
        inputs.extend(mask);
        let dtype = f32::datum_type();
        let op = Sdpa { scale: None, datum_type: dtype, acc_datum_type: dtype, is_causal: false };
        let out = self.wire(op, &inputs)?;
        let out = self.wire(AxisOp::Move(1, 2), &[out])?;
        self.wire(AxisOp::Reshape(2, apart, together), &[out])
    }

    fn linear(&mut self, x: OutletId, name: &str) -> TractResult<OutletId> {
        let weight = self.weight(&format!("{name}.weight"))?;
        let product = self.wire(EinSum::new("bnk,mk->bnm".parse()?, f32::datum_type()), &[x, weight])?;
        let bias = self.weight(&format!("{name}.bias"))?;
        self.wire(math::add(), &[product, bias])
    }

    fn norm(&mut self, x: OutletId, name: &str) -> TractResult<OutletId> {
        let sum = self.wire(Reduce { axes: tvec![2], reducer: Reducer::Sum }, &[x])?;
        let share = self.number((self.config.hidden_size as f32).recip())?;
        let mean = self.wire(math::mul(), &[sum, share])?;
        let centred = self.wire(math::sub(), &[x, mean])?;
        let normal = self.wire(RmsNorm { axis: 2, eps: tensor0(self.config.layer_norm_eps).into() }, &[centred])?;
        let weight = self.weight(&format!("{name}.weight"))?;
        let scaled = self.wire(math::mul(), &[normal, weight])?;
        let bias = self.weight(&format!("{name}.bias"))?;
        self.wire(math::add(), &[scaled, bias])
    }

    fn weight(&mut self, name: &str) -> TractResult<OutletId> {
        let weight = self.weights.tensor(name)?;
        ensure!(weight.dtype() == Dtype::F32, "{name} is not f32");
        let number = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let data: Vec<f32> = weight.data().chunks_exact(4).map(number).collect();
        self.model.add_const(name, Tensor::from_shape(weight.shape(), &data)?)
    }

    fn number(&mut self, x: f32) -> TractResult<OutletId> {
        self.model.add_const(format!("number {}", self.model.nodes.len()), tensor0(x))
    }

    /// A node, inputs of which are broadcast, named by its place.
    fn wire(&mut self, op: impl Into<Box<dyn TypedOp>>, inputs: &[OutletId]) -> TractResult<OutletId> {
        let (op, name) = (op.into(), format!("node {}", self.model.nodes.len()));
        let inputs = match op.is::<TypedBinOp>() {
            true => wire_rank_broadcast(&name, &mut self.model, inputs)?,
            false => inputs.into(),
        };
        Ok(self.model.wire_node(name, op, &inputs)?[0])
    }
}
