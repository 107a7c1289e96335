//! Translations of what is held out, and the alignment that the translator has learned.

use crate::corpus::{Batch, Corpus, Pair};
use crate::grammar::Phrase;
use crate::model::Translator;
use crate::training::Result;
use crate::training::pictures::{HeatMap, Labels, colour_bar, page, save};
use crate::words;
use std::path::Path;

/// Texts that are translated side by side.
const TOGETHER: usize = 256;

/// Number of texts that are translated exactly, of how many, and one of the others.
#[derive(Debug)]
pub(crate) struct Score {
    pub(crate) exact: usize,
    pub(crate) texts: usize,
    mistake: Option<String>,
}

impl Score {
    pub(crate) fn share(&self) -> f64 {
        self.exact as f64 / self.texts as f64
    }

    pub(crate) fn report(&self, what: &str) {
        let (exact, texts) = (self.exact, self.texts);
        println!("Held-out {what}: {exact} of {texts} translated exactly, {:.2} %", 100.0 * self.share());
        if let Some(mistake) = &self.mistake {
            println!("  not: {mistake}");
        }
    }
}

/// Translates phrases and holds the translations against those of the grammar.
pub(crate) fn score(model: &Translator, corpus: &Corpus, phrases: &[Phrase]) -> Result<Score> {
    let mut score = Score { exact: 0, texts: phrases.len(), mistake: None };
    for phrases in phrases.chunks(TOGETHER) {
        let batch = Batch::new(&corpus.pairs(phrases))?;
        for (phrase, got) in phrases.iter().zip(model.translate(&batch.source, &batch.lens)?) {
            let got: Vec<&str> = got.iter().map(|&id| corpus.french.word(id)).collect();
            if got == phrase.french {
                score.exact += 1;
            } else {
                let text = words::french(got);
                score.mistake = Some(format!("{} → {text}", phrase.english.join(" ")));
            }
        }
    }
    Ok(score)
}

/// Draws which English words the decoder looks at before each French one.
pub(crate) fn draw_alignment(model: &Translator, corpus: &Corpus, phrase: &Phrase, folder: &Path) -> Result<()> {
    let pairs = corpus.pairs(std::slice::from_ref(phrase));
    let weights = model.alignment(&Batch::new(&pairs)?)?.flatten_all()?.to_vec1::<f32>()?;
    let Pair { source, target } = &pairs[0];
    let french: Vec<String> = target.iter().map(|&id| corpus.french.word(id).to_owned()).collect();
    let english: Vec<String> = source.iter().map(|&id| corpus.english.word(id).to_owned()).collect();
    let (rows, columns) = (Labels::new("next word", &french), Labels::new("looks at", &english));
    let map = HeatMap { title: "", rows, columns, values: &weights, top: 1.0, cell: 36.0 };
    let bar = colour_bar("weight", 1.0, map.cell * french.len() as f64);
    let note = "Cross-attention of the last decoder layer, mean of its heads; the sentence is held out";
    save(&page("Learned alignment", note, 1, &[map.picture()], Some(bar)), folder, "translate-alignment")
}
