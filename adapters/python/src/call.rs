//! A call: arrays that are borrowed, settings, and what `sdpa` makes of them.

use crate::arguments::Arguments;
use crate::elements::{Floats, Typed, Uint16, as_bf16, is_mask, read_mask};
use crate::errors::{refused, value};
use crate::leading::{Leading, OWN, four};
use crate::outputs::Outputs;
use crate::settings;
use ndarray::{ArrayView, IxDyn};
use numpy::{PyReadonlyArrayDyn, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use sdpa::{Attention, Exec, Inputs, Mask, Plan, Problem, Tensor, View};

/// Arrays and settings of a call, without what it writes.
pub(crate) struct Call<'py> {
    py: Python<'py>,
    /// Every array that is read, queries first.
    arrays: Vec<(&'static str, Bound<'py, PyUntypedArray>)>,
    /// Queries, keys and values.
    tensors: [Floats<'py>; 3],
    mask: Option<PyReadonlyArrayDyn<'py, bool>>,
    /// Bias, with the name of its argument.
    bias: Option<(&'static str, Floats<'py>)>,
    lists: Lists,
    sizes: Sizes,
    attention: Attention,
    exec: Exec<'static>,
}

/// Lists of numbers.
struct Lists {
    alibi: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    kv_lens: Option<Vec<usize>>,
}

/// Sizes that arrays are held against.
struct Sizes {
    /// Shape of the output, in the number of dimensions of the inputs.
    out: Vec<usize>,
    /// Batch, heads, rows, keys.
    scores: [usize; 4],
    kv_heads: usize,
}

impl<'py> Call<'py> {
    /// Borrows the arrays and reads the settings.
    ///
    /// # Errors
    /// `TypeError` or `ValueError`, which name the argument.
    pub(crate) fn new(arguments: &Arguments<'_, 'py>) -> PyResult<Self> {
        let attention = settings::attention(arguments)?;
        let (exec, lists, uint16) = (settings::exec(arguments)?, Lists::new(arguments)?, Uint16::of(arguments)?);
        let array = |argument| PyResult::Ok((argument, arguments.required_array(argument)?));
        let given: [(&'static str, Bound<'py, PyUntypedArray>); 3] = [array("query")?, array("key")?, array("value")?];
        let leading = Leading::of(given.each_ref().map(|(argument, array)| (*argument, array)))?;
        let sizes = Sizes::of(arguments, &leading, given.each_ref().map(|(_, array)| array))?;
        let mut arrays = Vec::from(given);
        for (_, array) in &mut arrays {
            *array = leading.repeat(array)?;
        }
        let read = |n: usize| uint16.read(arrays[n].0, &arrays[n].1);
        let tensors = [read(0)?, read(1)?, read(2)?];
        let (mut mask, mut bias) = (None, None);
        for argument in ["attn_mask", "bias"] {
            let Some(array) = arguments.array(argument)? else { continue };
            let array = leading.repeat_mask(argument, array)?;
            if is_mask(&array) && argument == "attn_mask" {
                mask = Some(read_mask(argument, &array)?);
            } else if bias.is_some() {
                return Err(value(
                    "bias",
                    "attn_mask is a bias too, since its elements are floats: add one to the other",
                ));
            } else {
                bias = Some((argument, uint16.read(argument, &array)?));
            }
            arrays.push((argument, array));
        }
        Ok(Self { py: arguments.py(), arrays, tensors, mask, bias, lists, sizes, attention, exec })
    }

    /// Returns what the call writes.
    ///
    /// # Errors
    /// As [`Outputs::new`].
    pub(crate) fn outputs(&self, arguments: &Arguments<'_, 'py>) -> PyResult<Outputs<'py>> {
        Outputs::new(arguments, &self.arrays, &self.sizes.out)
    }

    /// Computes the call, without the lock of Python's interpreter.
    ///
    /// # Errors
    /// `ValueError` with the message of [`sdpa::Error`]; outputs are then untouched.
    pub(crate) fn run(&self, mut outputs: Outputs<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (problem, exec) = (self.problem(&mut outputs)?, self.exec);
        self.py.detach(|| problem.run_once(exec));
        outputs.into_arrays()
    }

    /// Returns the plan of the call, and the reasons for it.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(crate) fn explain(&self, mut outputs: Outputs<'py>) -> PyResult<String> {
        let problem = self.problem(&mut outputs)?;
        Ok(Plan::new(&problem, self.exec).explain(&problem, None).to_string())
    }

    fn problem<'a>(&'a self, outputs: &'a mut Outputs<'py>) -> PyResult<Problem<'a>> {
        self.attention.problem(self.inputs()?, outputs.views()?).map_err(refused)
    }

    fn inputs(&self) -> PyResult<Inputs<'_>> {
        let tensor_of = |n: usize| tensor(self.arrays[n].0, &self.tensors[n]);
        let mut inputs = Inputs::new(tensor_of(0)?, tensor_of(1)?, tensor_of(2)?);
        if let Some(mask) = &self.mask {
            let view = view("attn_mask", mask.as_array())?;
            self.sizes.check_scores("attn_mask", view.shape())?;
            inputs = inputs.mask(Mask::keep(view));
        }
        if let Some((argument, bias)) = &self.bias {
            let bias = tensor(argument, bias)?;
            self.sizes.check_scores(argument, bias.shape())?;
            inputs = inputs.bias(bias);
        }
        let Lists { alibi, sinks, kv_lens } = &self.lists;
        if let Some(slopes) = alibi {
            inputs = inputs.alibi(slopes);
        }
        if let Some(logits) = sinks {
            inputs = inputs.sinks(logits);
        }
        if let Some(lens) = kv_lens {
            inputs = inputs.kv_lens(lens);
        }
        Ok(inputs)
    }
}

/// Returns floats as `sdpa` reads them.
fn tensor<'a>(argument: &str, floats: &'a Floats<'_>) -> PyResult<Tensor<'a>> {
    Ok(match floats {
        Typed::F32(array) => view(argument, array.as_array())?.into(),
        Typed::F16(array) => view(argument, array.as_array())?.into(),
        Typed::Bf16(array) => view(argument, as_bf16(array.as_array()))?.into(),
    })
}

fn view<'a, T>(argument: &str, array: ArrayView<'a, T, IxDyn>) -> PyResult<View<'a, T>> {
    View::try_from(four(argument, array)?).map_err(|error| value(argument, error))
}

impl Lists {
    fn new(arguments: &Arguments<'_, '_>) -> PyResult<Self> {
        let [alibi, sinks] = ["alibi", "sinks"].map(|list| arguments.optional(list, "sequence of float, or None"));
        let lens: Option<Vec<i64>> = arguments.optional("kv_lens", "sequence of int, or None")?;
        let len = |(index, got)| {
            let why = |_| value("kv_lens", format_args!("entry {index} is {got}, but must be at least 0"));
            usize::try_from(got).map_err(why)
        };
        let kv_lens = lens.map(|lens| lens.into_iter().enumerate().map(len).collect()).transpose()?;
        Ok(Self { alibi: alibi?, sinks: sinks?, kv_lens })
    }
}

impl Sizes {
    /// Returns the sizes of a call.
    ///
    /// # Errors
    /// `ValueError` if the heads of queries and keys do not fit together.
    fn of(arguments: &Arguments<'_, '_>, leading: &Leading, qkv: [&Bound<'_, PyUntypedArray>; 3]) -> PyResult<Self> {
        let [[heads, rows, _], [kv_heads, keys, _], [.., value_dim]] = qkv.map(|array| {
            let (mut own, shape) = ([1; OWN], array.shape());
            let n = shape.len().min(OWN);
            own[OWN - n..].copy_from_slice(&shape[shape.len() - n..]);
            own
        });
        let grouped: bool = arguments.required("enable_gqa", "bool")?;
        if heads != kv_heads && !grouped {
            let why = "enable_gqa=True lets query heads share heads of key and value";
            return Err(value("key", format_args!("heads is {kv_heads}, but query has {heads}: {why}")));
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(value(
                "query",
                format_args!("heads is {heads}, but must be a multiple of {kv_heads}, those of key"),
            ));
        }
        let scores = [leading.batch, heads, rows, keys];
        Ok(Self { out: leading.shape(heads, &[rows, value_dim]), scores, kv_heads })
    }

    /// Refuses a mask or bias that is not broadcast to the scores.
    fn check_scores(&self, argument: &str, got: [usize; 4]) -> PyResult<()> {
        let fits =
            |(n, (got, size)): (usize, (&usize, &usize))| *got == 1 || got == size || (n == 1 && *got == self.kv_heads);
        if got.iter().zip(&self.scores).enumerate().all(fits) {
            return Ok(());
        }
        let names = "batch, heads, rows, keys";
        Err(value(argument, format_args!("shape is {got:?}, but must be broadcast to {:?} ({names})", self.scores)))
    }
}
