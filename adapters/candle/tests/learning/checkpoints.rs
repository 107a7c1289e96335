//! Training: with either attention, stopped and gone on with, and decoded with caches.

use crate::corpus::{Batch, Corpus, Pair};
use crate::file;
use crate::model::{Sizes, Translator};
use crate::training::{self, Attend, Schedule, Trainer};
use candle_core::{D, DType, Device};
use candle_nn::{VarBuilder, VarMap};
use std::collections::BTreeMap;
use std::path::Path;

const SCHEDULE: Schedule = Schedule { steps: 6, warmup: 2, peak: 1e-2 };

/// A translator before its training.
struct Learner {
    corpus: Corpus,
    sizes: Sizes,
    vars: VarMap,
    model: Translator,
    trainer: Trainer,
}

impl Learner {
    fn new(attend: Attend) -> Self {
        let (corpus, vars) = (Corpus::new(7), VarMap::new());
        let words = [corpus.english.words().len(), corpus.french.words().len()];
        let sizes = Sizes { words, width: 16, heads: 2, hidden: 24, layers: 2 };
        let weights = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let model = Translator::new(attend, sizes, &weights).unwrap();
        let trainer = Trainer::new(&vars, 3).unwrap();
        Self { corpus, sizes, vars, model, trainer }
    }

    fn train(&mut self, steps: usize, checkpoint: Option<&Path>) {
        let Self { corpus, model, trainer, .. } = self;
        let run = trainer.run(SCHEDULE, steps, checkpoint, |step| {
            let batch = corpus.batch(step, 4)?;
            Ok(training::Batch { loss: model.loss(&batch)?, tokens: batch.tokens })
        });
        run.unwrap();
    }

    fn values(&self) -> BTreeMap<String, Vec<f32>> {
        let vars = self.vars.data().lock().unwrap();
        vars.iter().map(|(name, var)| (name.clone(), var.flatten_all().unwrap().to_vec1().unwrap())).collect()
    }
}

#[test]
fn going_on_from_a_checkpoint_is_going_through() {
    let path = std::env::temp_dir().join(format!("sdpa-learning-{}.safetensors", std::process::id()));
    let mut through = Learner::new(Attend::Sdpa);
    let untrained = through.values();
    through.train(usize::MAX, None);
    assert_eq!(through.trainer.losses.len(), SCHEDULE.steps);
    let trained = through.values();
    assert!(untrained.iter().all(|(name, before)| trained[name] != *before), "every variable has moved");

    let mut first = Learner::new(Attend::Sdpa);
    first.train(3, Some(&path));
    let mut second = Learner::new(Attend::Sdpa);
    second.trainer.restore(&path).unwrap();
    second.train(usize::MAX, None);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(second.trainer.losses, through.trainer.losses);
    assert!(second.values() == trained, "the same bits");
}

#[test]
fn either_attention_learns_the_same() {
    let mut learners = [Attend::Sdpa, Attend::Candle].map(Learner::new);
    learners.iter_mut().for_each(|learner| learner.train(usize::MAX, None));
    let [ours, candle] = learners.map(|learner| learner.trainer.losses);
    assert!(ours[5] < ours[0], "{ours:?}");
    for (ours, candle) in ours.iter().zip(&candle) {
        assert!((ours - candle).abs() < 1e-3, "{ours} with this attention, {candle} with candle's");
    }
}

#[test]
fn a_missing_checkpoint_is_named() {
    let said = Learner::new(Attend::Sdpa).trainer.restore(Path::new("nowhere.safetensors")).unwrap_err().to_string();
    assert!(said.starts_with("nowhere.safetensors: no checkpoint to go on from: "), "{said}");
}

/// Words from caches, in a batch, are those of the whole without caches; a file has the model that was written to it.
#[test]
fn caches_and_files_change_no_word() {
    let mut learner = Learner::new(Attend::Sdpa);
    learner.train(usize::MAX, None);
    let phrases = learner.corpus.held_out_sentences(5);
    let batch = Batch::new(&learner.corpus.pairs(&phrases)).unwrap();
    let texts = learner.model.translate(&batch.source, &batch.lens).unwrap();
    for (text, phrase) in texts.iter().zip(&phrases) {
        let source = learner.corpus.pairs(std::slice::from_ref(phrase)).remove(0).source;
        let end = (text.len() < crate::words::POSITIONS).then_some(crate::words::END);
        let target: Vec<u32> = text.iter().copied().chain(end).collect();
        let whole = learner.model.logits(&Batch::new(&[Pair { source, target: target.clone() }]).unwrap()).unwrap();
        assert_eq!(whole.squeeze(0).unwrap().argmax(D::Minus1).unwrap().to_vec1::<u32>().unwrap(), target);
    }

    let path = std::env::temp_dir().join(format!("sdpa-translator-{}.safetensors", std::process::id()));
    file::write(&path, &learner.vars, learner.sizes, [&learner.corpus.english, &learner.corpus.french]).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let read = file::read(&bytes).unwrap();
    assert_eq!(read.words.each_ref().map(|words| words.words().len()), learner.sizes.words);
    let model = Translator::new(Attend::Sdpa, read.sizes, &read.vars).unwrap();
    let loss = |model: &Translator| model.loss(&batch).unwrap().to_scalar::<f32>().unwrap();
    let (before, after) = (loss(&learner.model), loss(&model));
    assert!((before - after).abs() < 1e-2, "loss {before}, and {after} in f16");
}
