//! What a BERT refuses: files, configurations, weights and tokens that do not fit. Every refusal names what is wrong.

use crate::support::{Rng, UNWRITTEN};
use crate::tiny_bert::{CONFIG, JSON, Model, model, source};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use sdpa_layers::{Bert, BertConfig, BertInput, Compute, ModelError, Pooling, SafeTensorsFile, Sequences};

/// A file of these tensors, all in one of the dtypes that are read, or in another.
fn file(model: &Model, dtype: Dtype) -> Vec<u8> {
    let bytes = |data: &[f32]| -> Vec<u8> {
        match dtype {
            Dtype::F16 => data.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect(),
            Dtype::BF16 => data.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect(),
            Dtype::F64 => data.iter().flat_map(|&x| f64::from(x).to_le_bytes()).collect(),
            _ => data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    };
    let owned: Vec<_> = model.iter().map(|(name, (shape, data))| (name, shape.clone(), bytes(data))).collect();
    let views = owned.iter().map(|(name, shape, data)| (name, TensorView::new(dtype, shape.clone(), data).unwrap()));
    safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap()
}

fn refusal(config: BertConfig, model: &Model) -> ModelError {
    Bert::new(config, &source(model)).expect_err("a model that does not fit")
}

fn embed(bert: &Bert, tokens: &[u32]) -> Vec<f32> {
    let mut out = vec![f32::from_bits(UNWRITTEN); bert.width()];
    let input = BertInput::new(tokens, Sequences::one(tokens.len()));
    bert.embed(input, Pooling::Mean, &mut out, &mut Compute::default()).unwrap();
    out
}

#[test]
fn files_of_every_dtype_are_read() {
    let model = model();
    for (dtype, round) in [
        (Dtype::F32, (|x| x) as fn(f32) -> f32),
        (Dtype::F16, |x| half::f16::from_f32(x).to_f32()),
        (Dtype::BF16, |x| half::bf16::from_f32(x).to_f32()),
    ] {
        let mut rounded = model.clone();
        rounded.values_mut().for_each(|(_, data)| data.iter_mut().for_each(|x| *x = round(*x)));
        let from_file = Bert::from_safetensors(JSON.as_bytes(), &file(&model, dtype)).unwrap();
        assert_eq!(*from_file.config(), CONFIG);
        let from_map = Bert::new(CONFIG, &source(&rounded)).unwrap();
        assert_eq!(embed(&from_file, &[3, 1, 4, 1, 5]), embed(&from_map, &[3, 1, 4, 1, 5]), "{dtype:?}");
    }
    let error = Bert::from_safetensors(JSON.as_bytes(), &file(&model, Dtype::F64)).unwrap_err();
    assert_eq!(error.to_string(), "embeddings.word_embeddings.weight: dtype is F64, but must be F32, F16 or BF16");
}

#[test]
fn every_missing_tensor_is_named() {
    let model = model();
    for name in model.keys() {
        let mut without = model.clone();
        without.remove(name);
        assert_eq!(refusal(CONFIG, &without), ModelError::Missing { tensor: name.clone() });
        assert_eq!(refusal(CONFIG, &without).to_string(), format!("{name}: no such tensor"));
    }
}

#[test]
fn every_tensor_of_another_shape_is_named_with_both_shapes() {
    let model = model();
    for (name, (shape, data)) in &model {
        let reversed: Vec<usize> = shape.iter().rev().copied().collect();
        let longer = [shape.as_slice(), &[1]].concat();
        let mut grown = shape.clone();
        grown[0] += 1;
        for got in [reversed, longer, grown] {
            let mut wrong = model.clone();
            let size = got.iter().product();
            let data = data.iter().copied().chain(core::iter::repeat(0.5)).take(size).collect();
            wrong.insert(name.clone(), (got.clone(), data));
            if got == *shape {
                Bert::new(CONFIG, &source(&wrong)).expect("a square reversed is no other shape");
                continue;
            }
            let expected = shape.clone();
            assert_eq!(refusal(CONFIG, &wrong), ModelError::Shape { tensor: name.clone(), got, expected });
        }
    }
    let mut wrong = model.clone();
    wrong.insert("embeddings.LayerNorm.bias".into(), (vec![2, 12], vec![0.0; 24]));
    assert_eq!(
        refusal(CONFIG, &wrong).to_string(),
        "embeddings.LayerNorm.bias: shape is [2, 12], but by the configuration must be [24]"
    );
}

#[test]
fn configurations_that_contradict_the_weights_are_refused() {
    let model = model();
    let shape = |name: &str, got: &[usize], expected: &[usize]| ModelError::Shape {
        tensor: name.to_owned(),
        got: got.to_vec(),
        expected: expected.to_vec(),
    };
    let config = |field, got: &str, expected: &str| ModelError::Config {
        field,
        got: got.to_owned(),
        expected: expected.to_owned(),
    };
    let absent = "at most 2: there is no encoder.layer.2.attention.self.query.weight";
    let middle = "encoder.layer.0.intermediate.dense.weight";
    let words = "embeddings.word_embeddings.weight";
    let at_least = "at least 1";
    for (wrong, error) in [
        (BertConfig { num_hidden_layers: 3, ..CONFIG }, config("num_hidden_layers", "3", absent)),
        (
            BertConfig { num_hidden_layers: usize::MAX, ..CONFIG },
            config("num_hidden_layers", &usize::MAX.to_string(), absent),
        ),
        (
            BertConfig { num_hidden_layers: 1, ..CONFIG },
            config("num_hidden_layers", "1", "more: there is encoder.layer.1.attention.self.query.weight"),
        ),
        (
            BertConfig { num_attention_heads: 5, ..CONFIG },
            config("num_attention_heads", "5", "a divisor of hidden_size, which is 24"),
        ),
        (BertConfig { num_attention_heads: 0, ..CONFIG }, config("num_attention_heads", "0", at_least)),
        (BertConfig { num_hidden_layers: 0, ..CONFIG }, config("num_hidden_layers", "0", at_least)),
        (BertConfig { hidden_size: 0, ..CONFIG }, config("hidden_size", "0", at_least)),
        (BertConfig { max_position_embeddings: 0, ..CONFIG }, config("max_position_embeddings", "0", at_least)),
        (BertConfig { layer_norm_eps: f32::NAN, ..CONFIG }, config("layer_norm_eps", "NaN", "finite and not negative")),
        (BertConfig { vocab_size: 51, ..CONFIG }, shape(words, &[50, 24], &[51, 24])),
        (BertConfig { hidden_size: 48, ..CONFIG }, shape(words, &[50, 24], &[50, 48])),
        (BertConfig { hidden_size: usize::MAX / 3 * 3, ..CONFIG }, shape(words, &[50, 24], &[50, usize::MAX / 3 * 3])),
        (BertConfig { intermediate_size: 40, ..CONFIG }, shape(middle, &[41, 24], &[40, 24])),
        (
            BertConfig { max_position_embeddings: 512, ..CONFIG },
            shape("embeddings.position_embeddings.weight", &[20, 24], &[512, 24]),
        ),
        (
            BertConfig { type_vocab_size: 1, ..CONFIG },
            shape("embeddings.token_type_embeddings.weight", &[2, 24], &[1, 24]),
        ),
    ] {
        assert_eq!(refusal(wrong, &model), error);
    }
}

#[test]
fn configurations_that_are_none_are_refused() {
    let refusal = |json: &str| BertConfig::from_json(json.as_bytes()).unwrap_err().to_string();
    assert_eq!(BertConfig::from_json(JSON.as_bytes()).unwrap(), CONFIG);
    for text in ["", "{", "[]", "7", "{}x", "\u{0}"] {
        assert!(refusal(text).starts_with("not a configuration in JSON: "), "{text}");
    }
    for (from, to, message) in [
        ("\"hidden_size\"", "\"size\"", "hidden_size is missing, but must be a whole number"),
        (": 24", ": -24", "hidden_size is -24, but must be a whole number"),
        (": 24", ": 24.5", "hidden_size is 24.5, but must be a whole number"),
        (": 24", ": \"24\"", "hidden_size is \"24\", but must be a whole number"),
        (": 24", ": 25", "num_attention_heads is 3, but must be a divisor of hidden_size, which is 25"),
        ("1e-12", "\"tiny\"", "layer_norm_eps is \"tiny\", but must be a number"),
        ("1e-12", "-1", "layer_norm_eps is -1, but must be finite and not negative"),
        ("\"bert\"", "\"gpt2\"", "model_type is \"gpt2\", but must be \"bert\""),
        ("\"absolute\"", "\"relative_key\"", "position_embedding_type is \"relative_key\", but must be \"absolute\""),
        ("\"use_cache\"", "\"is_decoder\"", "is_decoder is true, but must be false"),
        (
            "\"gelu\"",
            "\"mish\"",
            "hidden_act is \"mish\", but must be \"gelu\" or \"gelu_new\" or \"gelu_pytorch_tanh\" or \"relu\" or \
             \"silu\" or \"swish\"",
        ),
    ] {
        assert!(JSON.contains(from));
        assert_eq!(refusal(&JSON.replacen(from, to, 1)), format!("configuration: {message}"));
    }
}

#[test]
fn every_truncated_file_is_refused() {
    let whole = file(&model(), Dtype::F32);
    let header = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let mut rng = Rng::new(2);
    let lengths = (0..header + 200).chain((0..200).map(|_| rng.below(whole.len()))).chain([whole.len() - 1]);
    for len in lengths {
        let error = SafeTensorsFile::new(&whole[..len]).unwrap_err();
        let (got, expected) = (len as u64, if len < header { header } else { whole.len() } as u64);
        if len < 8 {
            assert!(matches!(error, ModelError::Format { .. }), "{len}: {error}");
        } else {
            assert_eq!(error, ModelError::Length { got, expected });
        }
        assert_eq!(Bert::from_safetensors(JSON.as_bytes(), &whole[..len]).unwrap_err(), error);
    }
    let longer = [&whole[..], &[0]].concat();
    let error = SafeTensorsFile::new(&longer).unwrap_err().to_string();
    assert_eq!(error, format!("the file has {} bytes, but its header speaks of {}", longer.len(), whole.len()));
}

/// Any byte of the header changed to any other: refused, or as good a file, but never a panic.
#[test]
fn corrupt_headers_never_panic() {
    let whole = file(&model(), Dtype::F32);
    let header = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let mut rng = Rng::new(3);
    let mut refused = 0;
    for at in (0..header).chain(0..header) {
        let mut corrupt = whole.clone();
        corrupt[at] = rng.bits() as u8;
        refused += usize::from(Bert::from_safetensors(JSON.as_bytes(), &corrupt).is_err());
    }
    assert!(refused > header, "{refused}");
    let not_json = [&8u64.to_le_bytes()[..], b"not JSON"].concat();
    let error = SafeTensorsFile::new(&not_json).unwrap_err().to_string();
    assert!(error.starts_with("not a safetensors file: "), "{error}");
}

#[test]
fn tokens_and_texts_that_do_not_fit_are_refused_before_anything_is_written() {
    let model = model();
    let bert = Bert::new(CONFIG, &source(&model)).unwrap();
    let (words, positions) = ("embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight");
    let kinds = "embeddings.token_type_embeddings.weight";
    let good = vec![1; 5];
    let mut out = vec![f32::from_bits(UNWRITTEN); 30 * CONFIG.hidden_size];
    let mut refusal = |input: BertInput<'_>, rows: usize, texts: usize| {
        let mut compute = Compute::default();
        let (hidden, embedded) = (rows * CONFIG.hidden_size, texts * CONFIG.hidden_size);
        let error = bert.forward(input, &mut out[..hidden], &mut compute).unwrap_err();
        assert_eq!(bert.embed(input, Pooling::Mean, &mut out[..embedded], &mut compute).unwrap_err(), error);
        assert!(out.iter().all(|x| x.to_bits() == UNWRITTEN), "a refused call wrote");
        error.to_string()
    };
    for (tokens, index, got) in [(&[1, 2, 50, 3, 60][..], 2, 50), (&[u32::MAX, 0, 0, 0, 0], 0, u32::MAX)] {
        let error = refusal(BertInput::new(tokens, Sequences::Ragged(&[0, 2, 5])), 5, 2);
        assert_eq!(error, format!("token {index} is {got}, but {words} has 50 rows"));
    }
    let two = Sequences::Ragged(&[0, 2, 5]);
    let error = refusal(BertInput::new(&good, two).types(&[0, 1, 1, 2, 0]), 5, 2);
    assert_eq!(error, format!("token 3 is 2, but {kinds} has 2 rows"));
    let error = refusal(BertInput::new(&good, two).types(&[0, 1]), 5, 2);
    assert_eq!(error, "types: length is 2, but the tokens has 5");
    let long = vec![1; 25];
    for sequences in [Sequences::Ragged(&[0, 4, 25]), Sequences::Ragged(&[0, 3, 3, 25])] {
        let (last, len) = (sequences.count() - 1, sequences.rows(sequences.count() - 1).len());
        let error = refusal(BertInput::new(&long, sequences), 25, sequences.count());
        assert_eq!(error, format!("sequence {last} has {len} tokens, but {positions} has 20 rows"));
    }
    let error = refusal(BertInput::new(&long[..21], Sequences::one(21)), 21, 1);
    assert_eq!(error, format!("sequence 0 has 21 tokens, but {positions} has 20 rows"));
    for sequences in [
        Sequences::Ragged(&[]),
        Sequences::Ragged(&[0, 4]),
        Sequences::Ragged(&[1, 5]),
        Sequences::Ragged(&[0, 4, 3, 5]),
        Sequences::one(4),
        Sequences::Even { batch: usize::MAX, len: 2 },
    ] {
        refusal(BertInput::new(&good, sequences), 5, 1);
    }
    let input = BertInput::new(&good, two);
    let mut compute = Compute::default();
    assert!(bert.forward_to(3, input, &mut out[..120], &mut compute).is_err());
    assert!(bert.forward(input, &mut out[..119], &mut compute).is_err());
    assert!(bert.embed(input, Pooling::Mean, &mut out[..47], &mut compute).is_err());
    let endless = BertInput::new(&[], Sequences::Even { batch: usize::MAX, len: 0 });
    assert!(bert.embed(endless, Pooling::Mean, &mut [], &mut compute).is_err());
    assert!(out.iter().all(|x| x.to_bits() == UNWRITTEN), "a refused call wrote");
}
