//! The whole of all-MiniLM-L6-v2, where it is present: `.ci/fetch-minilm` gets it. Texts, tokenizer and embeddings are
//! tested with `examples/embed`; here are the hidden states.

use safetensors::SafeTensors;
use sdpa::Isa;
use sdpa_layers::{Bert, BertInput, Compute, Sequences};
use std::io::Write as _;

#[test]
fn hidden_states_after_each_layer_where_the_model_is_present() {
    let Some(folder) = crate::model_folder::folder("hidden_states_after_each_layer") else { return };
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let bert = Bert::from_safetensors(&read("config.json"), &read("model.safetensors")).unwrap();
    for text in ["park", "sauerkraut"] {
        let fixture = std::fs::read(crate::model_folder::fixture(&format!("minilm_{text}.safetensors"))).unwrap();
        let fixture = SafeTensors::deserialize(&fixture).unwrap();
        let ids = fixture.tensor("input_ids").unwrap();
        let ids: Vec<u32> = ids.data().as_chunks().0.iter().map(|&id| i64::from_le_bytes(id) as u32).collect();
        let input = BertInput::new(&ids, Sequences::one(ids.len()));
        for isa in Isa::available() {
            let mut compute = Compute::new(sdpa::Exec::serial().isa(isa));
            let mut worst = 0.0f32;
            for layers in 0..=6 {
                let expected = fixture.tensor(&format!("hidden.{layers}")).unwrap();
                let expected = expected.data().as_chunks().0.iter().map(|&x| f32::from_le_bytes(x));
                let mut got = vec![0.0; ids.len() * bert.width()];
                assert_eq!(expected.len(), got.len());
                bert.forward_to(layers, input, &mut got, &mut compute).unwrap();
                let error = got.iter().zip(expected).fold(0.0f32, |most, (got, x)| most.max((got - x).abs()));
                assert!(error < 2e-5, "{text}, after layer {layers}, {isa}: off by {error:e}");
                worst = worst.max(error);
            }
            let _ = writeln!(std::io::stderr(), "{text}, {isa}: hidden states off by {worst:e} at most");
        }
    }
}
