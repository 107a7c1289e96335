//! Loop of training: batch, loss, gradients, step; with a progress bar, and checkpoints to go on from.

use super::Result;
use super::adamw::AdamW;
use candle_core::{Device, Tensor, Var};
use candle_nn::VarMap;
use indicatif::{ProgressBar, ProgressStyle};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Normal};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// Loss of a batch, and the number of tokens that it has.
pub(crate) struct Batch {
    pub(crate) loss: Tensor,
    pub(crate) tokens: usize,
}

/// Learning rate of each step: linear to the peak, then a cosine to zero.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Schedule {
    pub(crate) steps: usize,
    pub(crate) warmup: usize,
    pub(crate) peak: f64,
}

impl Schedule {
    fn rate(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let share = (step - self.warmup) as f64 / (self.steps.max(self.warmup + 1) - self.warmup) as f64;
        self.peak * 0.5 * (1.0 + (std::f64::consts::PI * share.min(1.0)).cos())
    }
}

/// Tokens and time of a run.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Speed {
    pub(crate) tokens: usize,
    pub(crate) time: Duration,
}

impl Speed {
    pub(crate) fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// Model in training: its variables, the optimiser's moments, and the loss of every step so far.
pub(crate) struct Trainer {
    adamw: AdamW,
    pub(crate) losses: Vec<f32>,
}

/// Steps between checkpoints.
const CHECKPOINT: usize = 500;

impl Trainer {
    /// Takes the variables of a model and draws their first values by a seed.
    pub(crate) fn new(vars: &VarMap, seed: u64) -> Result<Self> {
        let vars: BTreeMap<String, Var> = vars.data().lock().expect("nobody panicked").clone().into_iter().collect();
        let mut rng = StdRng::seed_from_u64(seed);
        for (name, var) in &vars {
            let spread = match var.dims() {
                // Rows of an embedding are as long as the positions that are added to them.
                _ if name.starts_with("embedding") => 0.5f64.sqrt(),
                // Glorot and Bengio 2010
                &[outputs, inputs] => (2.0 / (outputs + inputs) as f64).sqrt(),
                _ => continue, // gains of norms are 1
            };
            let values = Normal::new(0.0, spread)?.sample_iter(&mut rng).take(var.elem_count());
            let values = values.map(|x| x as f32).collect();
            var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu)?)?;
        }
        Ok(Self { adamw: AdamW::new(vars), losses: Vec::new() })
    }

    /// Trains up to the last step of the schedule, or as many more steps as `at_most`. A batch is asked for by its step.
    pub(crate) fn run(
        &mut self,
        schedule: Schedule,
        at_most: usize,
        checkpoint: Option<&Path>,
        mut batch: impl FnMut(usize) -> Result<Batch>,
    ) -> Result<Speed> {
        let (begin, mut speed) = (Instant::now(), Speed::default());
        let last = schedule.steps.min(self.losses.len().saturating_add(at_most));
        let bar = ProgressBar::new(schedule.steps as u64).with_position(self.losses.len() as u64);
        bar.set_style(ProgressStyle::with_template("{wide_bar} {pos}/{len} steps, {elapsed} of {duration}, {msg}")?);
        while self.losses.len() < last {
            let step = self.losses.len();
            let Batch { loss, tokens } = batch(step)?;
            let rate = schedule.rate(step);
            self.adamw.step(&loss.backward()?, step + 1, rate)?;
            self.losses.push(loss.to_scalar()?);
            speed = Speed { tokens: speed.tokens + tokens, time: begin.elapsed() };
            let recent = &self.losses[self.losses.len().saturating_sub(50)..];
            let loss = recent.iter().sum::<f32>() / recent.len() as f32;
            bar.set_message(format!("loss {loss:.4}, {:.0} tokens/s", speed.tokens_per_second()));
            bar.inc(1);
            if let Some(path) = checkpoint.filter(|_| (step + 1).is_multiple_of(CHECKPOINT) || step + 1 == last) {
                self.save(path)?;
            }
        }
        bar.finish();
        Ok(speed)
    }

    /// Writes variables, moments and losses; the file before it stays until this one is whole.
    pub(crate) fn save(&self, path: &Path) -> Result<()> {
        let mut tensors = self.adamw.tensors()?;
        tensors.insert("losses".to_owned(), Tensor::new(&self.losses[..], &Device::Cpu)?);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let new = path.with_extension("new");
        candle_core::safetensors::save(&tensors, &new)?;
        Ok(std::fs::rename(new, path)?)
    }

    /// Goes on from where a checkpoint stopped.
    pub(crate) fn restore(&mut self, path: &Path) -> Result<()> {
        let tensors = candle_core::safetensors::load(path, &Device::Cpu)
            .map_err(|e| format!("{}: no checkpoint to go on from: {e}", path.display()))?;
        self.adamw.restore(&tensors)?;
        let losses = tensors.get("losses").ok_or("losses: no such tensor in the checkpoint")?;
        self.losses = losses.to_vec1()?;
        Ok(())
    }
}
