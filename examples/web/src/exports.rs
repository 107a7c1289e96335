//! Functions for JavaScript. It asks for room, writes tokens or files there, calls, and reads tensors where [`data`] says.
#![expect(unsafe_code, reason = "names that are exported; there is no block of unsafe code")]

use crate::heads::Heads;
use crate::model::{Model, NAMES, Result, Tensors};
use sdpa_layers::{BertConfig, Tensor};
use std::cell::RefCell;

/// Bytes that JavaScript writes: integers, such as tokens; a text; the numbers of a tensor.
const INTEGERS: usize = 0;
const TEXT: usize = 1;
const NUMBERS: usize = 2;

/// State of the page.
#[derive(Debug)]
struct Page {
    model: Option<Model>,
    heads: Heads,
    /// Tensors of a model that is not yet open.
    tensors: Tensors,
    rooms: [Vec<u8>; 3],
    /// Message of the last call that failed.
    message: String,
}

thread_local! {
    static PAGE: RefCell<Page> = const {
        RefCell::new(Page {
            model: None,
            heads: Heads::new(),
            tensors: Tensors::new(),
            rooms: [const { Vec::new() }; 3],
            message: String::new(),
        })
    };
}

/// Makes a call; returns 1 if it succeeded, otherwise 0, and keeps the message.
fn call(run: impl FnOnce(&mut Page) -> Result<()>) -> u32 {
    PAGE.with_borrow_mut(|page| match run(page) {
        Ok(()) => 1,
        Err(error) => {
            page.message = error.to_string();
            0
        }
    })
}

impl Page {
    fn project(&mut self, layer: usize, tokens: &[u32]) -> Result<()> {
        let model = self.model.as_mut().ok_or("no model is open")?;
        let tensors = model.project(layer, tokens)?;
        self.heads.take(tensors, model.heads(), tokens.len());
        Ok(())
    }

    /// Integers that JavaScript has written.
    fn integers(&self) -> Vec<u32> {
        self.rooms[INTEGERS].as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect()
    }
}

/// Makes room for bytes of this kind (integers 0, text 1, numbers of f32 2), which JavaScript then writes there.
#[unsafe(no_mangle)]
pub extern "C" fn room(kind: usize, len: usize) -> *mut u8 {
    PAGE.with_borrow_mut(|page| {
        page.rooms[kind] = vec![0; len];
        page.rooms[kind].as_mut_ptr()
    })
}

/// Opens the words that are part of this module.
#[unsafe(no_mangle)]
pub extern "C" fn open_words() -> u32 {
    call(|page| {
        page.model = Some(Model::words()?);
        Ok(())
    })
}

/// Takes a tensor (JavaScript has written its name, sizes and numbers), for [`open_bert`].
#[unsafe(no_mangle)]
pub extern "C" fn add_tensor() -> u32 {
    call(|page| {
        let shape: Vec<usize> = page.integers().into_iter().map(|n| n as usize).collect();
        let [name, bytes] = [TEXT, NUMBERS].map(|kind| std::mem::take(&mut page.rooms[kind]));
        let numbers: Vec<f32> = bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        page.tensors.add(String::from_utf8(name)?, Tensor::new(shape, numbers)?);
        Ok(())
    })
}

/// Opens the BERT of these tensors; JavaScript has written its sizes as integers.
#[unsafe(no_mangle)]
pub extern "C" fn open_bert(layer_norm_eps: f32) -> u32 {
    call(|page| {
        let sizes: Vec<usize> = page.integers().into_iter().map(|n| n as usize).collect();
        let &[vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, positions, types] =
            &sizes[..]
        else {
            return Err("a BERT has seven sizes".into());
        };
        let config = BertConfig {
            vocab_size,
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            intermediate_size,
            max_position_embeddings: positions,
            type_vocab_size: types,
            layer_norm_eps,
            ..BertConfig::default()
        };
        page.model = Some(Model::bert(config, &std::mem::take(&mut page.tensors))?);
        Ok(())
    })
}

/// Runs the model to a layer and computes the output and the weights of its attention.
#[unsafe(no_mangle)]
pub extern "C" fn weigh(layer: usize) -> u32 {
    call(|page| {
        let tokens = page.integers();
        page.project(layer, &tokens)?;
        page.heads.weigh()
    })
}

/// Computes the output once more, without the weights: for its time.
#[unsafe(no_mangle)]
pub extern "C" fn attend() -> u32 {
    call(|page| page.heads.attend())
}

/// Number of layers of the model.
#[unsafe(no_mangle)]
pub extern "C" fn layers() -> usize {
    PAGE.with_borrow(|page| page.model.as_ref().map_or(0, Model::layers))
}

/// Number of heads of each layer.
#[unsafe(no_mangle)]
pub extern "C" fn heads() -> usize {
    PAGE.with_borrow(|page| page.model.as_ref().map_or(0, Model::heads))
}

/// Address of queries 0, keys 1, values 2, output 3, `[tokens, heads, head_dim]`, weights 4, `[heads, tokens, tokens]`;
/// of the words 5 and the message 6, UTF-8.
#[unsafe(no_mangle)]
pub extern "C" fn data(kind: usize) -> *const u8 {
    PAGE.with_borrow(|page| match kind {
        5 => NAMES.as_ptr(),
        6 => page.message.as_ptr(),
        _ => page.heads.tensor(kind).as_ptr().cast(),
    })
}

/// Length of what [`data`] is the address of: numbers, or bytes of text.
#[unsafe(no_mangle)]
pub extern "C" fn len(kind: usize) -> usize {
    PAGE.with_borrow(|page| match kind {
        5 => NAMES.len(),
        6 => page.message.len(),
        _ => page.heads.tensor(kind).len(),
    })
}
