//! Queries, keys and values of a trained decoder: the self-attention of the French decoder in `layers/examples/translate`, as it
//! translates sentences word by word.

use safetensors::SafeTensors;
use sdpa::{Alignment, Attention, Inputs, Outputs, View, ViewMut};
use std::collections::HashMap;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/layers/examples/models/translator.safetensors");
const WIDTH: usize = 128;
pub(crate) const HEADS: usize = 4;
pub(crate) const HEAD_DIM: usize = WIDTH / HEADS;
pub(crate) const LAYERS: usize = 2;
/// Mark of the end, and longest text.
const END: usize = 0;
const POSITIONS: usize = 64;

const SUBJECTS: [&str; 8] = [
    "my sister",
    "the old teacher",
    "our neighbour",
    "this intelligent woman",
    "the french doctor",
    "your brother",
    "the tired man",
    "his small friend",
];
const PREDICATES: [&str; 8] = [
    "always reads the newspaper",
    "does not want a red apple",
    "sells eighty one small white flowers",
    "goes to the museum with my friends",
    "likes to dance in the garden",
    "often forgets her heavy umbrella",
    "lives in a quiet village",
    "sees seven thousand four hundred and thirty five birds",
];

/// Queries, keys and values of the layers' heads, `[LAYERS × HEADS, tokens, HEAD_DIM]`: those of the sentences end to end.
pub(crate) struct Tensors {
    pub(crate) tokens: usize,
    pub(crate) qkv: [Vec<f32>; 3],
}

/// Translates the sentences of the first subjects.
pub(crate) fn tensors(subjects: usize) -> Tensors {
    let model = Model::read();
    let sentences = SUBJECTS[..subjects].iter().flat_map(|subject| PREDICATES.map(|rest| format!("{subject} {rest}")));
    let parts: Vec<_> = sentences.map(|sentence| model.translate(&sentence)).collect();
    let head = |which: usize, head: usize| {
        let rows = parts.iter().flat_map(move |(_, layers)| layers[head / HEADS][which].chunks(WIDTH));
        rows.flat_map(move |row| row[head % HEADS * HEAD_DIM..][..HEAD_DIM].iter().copied())
    };
    let qkv = [0, 1, 2].map(|which| (0..LAYERS * HEADS).flat_map(|h| head(which, h)).collect());
    Tensors { tokens: parts.iter().map(|(words, _)| words).sum(), qkv }
}

/// Queries, keys and values of a layer, `[tokens, WIDTH]`.
type Layer = [Vec<f32>; 3];

/// Parameters by name, and English words by number.
struct Model {
    parameters: HashMap<String, Vec<f32>>,
    english: Vec<String>,
}

impl Model {
    fn read() -> Self {
        let bytes = std::fs::read(MODEL).expect("the repository's translator");
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a safetensors file");
        let notes = header.metadata().clone().expect("lists of words");
        let english = notes["english"].split(' ').map(str::to_owned).collect();
        let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let floats = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|&x| half::f16::from_le_bytes(x).to_f32()).collect();
        let parameters = file.iter().map(|(name, tensor)| (name.to_owned(), floats(tensor.data()))).collect();
        Self { parameters, english }
    }

    /// Returns the number of French words, a mark before them, and the decoder's layers for these.
    fn translate(&self, sentence: &str) -> (usize, Vec<Layer>) {
        let number = |word: &str| self.english.iter().position(|known| known == word).expect("a word that was learned");
        let source: Vec<usize> = sentence.split(' ').map(number).chain([END]).collect();
        let mut states = self.embed("english", &source);
        for layer in 0..LAYERS {
            let name = format!("encoder.{layer}");
            self.attend(&format!("{name}.self"), &mut states, None, Attention::new());
            self.feed_forward(&name, &mut states);
        }
        let states = self.norm("encoder.norm", &states);
        let mut words = vec![END];
        loop {
            let (rows, layers) = self.decode(&words, &states);
            let logits = self.project("head", &rows[rows.len() - WIDTH..]);
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).expect("words");
            if best == END || words.len() == POSITIONS {
                return (words.len(), layers);
            }
            words.push(best);
        }
    }

    /// Returns the decoder's states after its norm, and what its layers attend with.
    fn decode(&self, words: &[usize], states: &[f32]) -> (Vec<f32>, Vec<Layer>) {
        let mut x = self.embed("french", words);
        let layer = |layer: usize| {
            let name = format!("decoder.{layer}");
            let causal = Attention::new().causal().align(Alignment::TopLeft);
            let own = self.attend(&format!("{name}.self"), &mut x, None, causal);
            self.attend(&format!("{name}.cross"), &mut x, Some(states), Attention::new());
            self.feed_forward(&name, &mut x);
            own
        };
        let layers = (0..LAYERS).map(layer).collect();
        (self.norm("decoder.norm", &x), layers)
    }

    /// Words and sinusoidal positions.
    fn embed(&self, language: &str, words: &[usize]) -> Vec<f32> {
        let table = &self.parameters[&format!("embedding.{language}.weight")];
        let element = |position: usize, column: usize| {
            let angle = position as f64 * 1e4f64.powf(-((column - column % 2) as f64) / WIDTH as f64);
            (if column.is_multiple_of(2) { angle.sin() } else { angle.cos() }) as f32
        };
        let row = |(position, &word): (usize, &usize)| {
            (0..WIDTH).map(move |column| table[word * WIDTH + column] + element(position, column))
        };
        words.iter().enumerate().flat_map(row).collect()
    }

    /// Root mean square norm of rows.
    fn norm(&self, name: &str, x: &[f32]) -> Vec<f32> {
        let weight = &self.parameters[&format!("{name}.weight")];
        let row = |row: &[f32]| {
            let mean = row.iter().map(|x| x * x).sum::<f32>() / WIDTH as f32;
            row.iter().zip(weight).map(|(x, w)| x / (mean + 1e-6).sqrt() * w).collect::<Vec<_>>()
        };
        x.chunks(WIDTH).flat_map(row).collect()
    }

    /// Products of rows, which are as long as the matrix's rows, with it.
    fn project(&self, name: &str, x: &[f32]) -> Vec<f32> {
        let weight = &self.parameters[&format!("{name}.weight")];
        let inputs = if name.ends_with("down") { 4 * WIDTH } else { WIDTH };
        let dot = |row: &[f32], weights: &[f32]| row.iter().zip(weights).map(|(x, w)| x * w).sum::<f32>();
        let rows = x.chunks(inputs).flat_map(|row| weight.chunks(inputs).map(move |weights| dot(row, weights)));
        rows.collect()
    }

    /// Adds attention to these states, or to the rows themselves, and returns what it attends with.
    fn attend(&self, name: &str, x: &mut [f32], states: Option<&[f32]>, attention: Attention) -> Layer {
        let normed = self.norm(&format!("{name}.norm"), x);
        let memory = states.unwrap_or(&normed);
        let [q, k, v] = [("q", &normed[..]), ("k", memory), ("v", memory)]
            .map(|(part, x)| self.project(&format!("{name}.{part}"), x));
        let shape = |x: &[f32]| [1, x.len() / WIDTH, HEADS, HEAD_DIM];
        let view = |x| View::blhd(x, shape(x)).expect("rows of all heads");
        let mut joined = vec![0.0; q.len()];
        let outputs = Outputs::new(ViewMut::blhd(&mut joined, shape(&q)).expect("rows of all heads"));
        sdpa::attention(&attention, Inputs::new(view(&q), view(&k), view(&v)), outputs).expect("shapes that fit");
        add(x, &self.project(&format!("{name}.out"), &joined));
        [q, k, v]
    }

    fn feed_forward(&self, layer: &str, x: &mut [f32]) {
        let name = format!("{layer}.feed_forward");
        let mut hidden = self.project(&format!("{name}.up"), &self.norm(&format!("{name}.norm"), x));
        hidden.iter_mut().for_each(|x| *x = x.max(0.0));
        add(x, &self.project(&format!("{name}.down"), &hidden));
    }
}

fn add(x: &mut [f32], part: &[f32]) {
    x.iter_mut().zip(part).for_each(|(x, part)| *x += part);
}
