//! Every layer against PyTorch's answers, on every instruction set: `tests/fixtures/torch_layers.safetensors`, or the file
//! that `SDPA_TORCH_LAYERS` names.

use crate::fixture::{Fixture, assert_close};
use crate::models::{Params, decoder_layer, encoder_layer, gpt2, llama, multi_head};
use sdpa::{Attention, Exec, Isa, Mask, View, ViewMut};
use sdpa_layers::{
    Activation, Compute, Embedding, LayerInput, MultiHeadAttention, MultiHeadInput, NormOrder, Rope, RopePairs,
    Sequences,
};

/// What the answers may be off by.
const TOLERANCE: f64 = 1e-5;

fn answers() -> Fixture {
    Fixture::open("torch_layers.safetensors", "SDPA_TORCH_LAYERS")
}

/// Runs on every instruction set, one thread and all, and compares with each of the answers.
fn check<const N: usize>(file: &Fixture, names: [&str; N], forward: impl Fn([&mut [f32]; N], &mut Compute)) {
    let expected = names.map(|name| file.floats(name));
    for isa in Isa::available() {
        for exec in [Exec::serial().isa(isa), Exec::default().isa(isa)] {
            let mut got = expected.each_ref().map(|expected| vec![f32::NAN; expected.len()]);
            forward(got.each_mut().map(|got| &mut got[..]), &mut Compute::new(exec));
            for ((name, got), expected) in names.iter().zip(&got).zip(&expected) {
                let off = assert_close(&format!("{name} on {isa}"), got, expected, TOLERANCE);
                println!("{name} on {isa}: {off:.2e}");
            }
        }
    }
}

#[test]
fn sinusoidal() {
    let file = answers();
    let [positions, width] = file.shape("sinusoidal.out");
    let table = Embedding::sinusoidal(positions, width).unwrap();
    check(&file, ["sinusoidal.out"], |[out], compute| {
        out.fill(0.0);
        table.add_positions(out, Sequences::one(positions), 0, compute).unwrap();
    });
}

/// `[a][b][c]` to `[b][a][c]`.
fn swapped(x: &[f32], [a, b, c]: [usize; 3]) -> Vec<f32> {
    let run = |i: usize, j: usize| &x[(i * b + j) * c..][..c];
    (0..b).flat_map(|j| (0..a).flat_map(move |i| run(i, j))).copied().collect()
}

#[test]
fn rope() {
    let file = answers();
    let [_, heads, rows, dim] = file.shape("rope.in");
    // The file has heads before rows.
    let x = swapped(&file.floats("rope.in"), [heads, rows, dim]);
    for (name, pairs) in [("rope.out.half", RopePairs::Half), ("rope.out.interleaved", RopePairs::Interleaved)] {
        let rope = Rope::new(64, dim, 10_000.0, pairs).unwrap();
        check(&file, [name], |[out], compute| {
            let mut x = x.clone();
            rope.rotate(&mut x, [heads, dim], Sequences::one(rows), 5, compute).unwrap();
            out.copy_from_slice(&swapped(&x, [rows, heads, dim]));
        });
    }
}

/// The sequences of a `[batch, len, width]` tensor.
fn sequences(file: &Fixture, name: &str) -> Sequences<'static> {
    let [batch, len, _] = file.shape(name);
    Sequences::Even { batch, len }
}

/// Output and weights of a multi-head attention.
fn check_multi_head(file: &Fixture, name: &str, layer: &MultiHeadAttention, input: MultiHeadInput<'_>) {
    let names = [format!("{name}.out.y"), format!("{name}.out.weights")];
    let shape = file.shape(&names[1]);
    check(file, [&names[0], &names[1]], |[out, weights], compute| {
        let weights = ViewMut::bhld(weights, shape).unwrap();
        layer.forward_with_weights(input, out, weights, compute).unwrap();
    });
    // The weights are not needed.
    check(file, [&names[0]], |[out], compute| layer.forward(input, out, compute).unwrap());
}

#[test]
fn multi_head_attention_to_itself() {
    let file = answers();
    for (name, attention) in [("mha_self", Attention::new()), ("mha_causal", Attention::new().causal())] {
        let layer = multi_head(&Params::new(&file, name), 4).attention(attention);
        let x = format!("{name}.in.x");
        check_multi_head(&file, name, &layer, MultiHeadInput::new(&file.floats(&x), sequences(&file, &x)));
    }
}

#[test]
fn multi_head_attention_to_a_context() {
    let file = answers();
    let layer = multi_head(&Params::new(&file, "mha_cross"), 4);
    let (x, context) = (file.floats("mha_cross.in.x"), file.floats("mha_cross.in.context"));
    let input = MultiHeadInput::new(&x, sequences(&file, "mha_cross.in.x"))
        .memory(&context, sequences(&file, "mha_cross.in.context"));
    check_multi_head(&file, "mha_cross", &layer, input);
}

#[test]
fn multi_head_attention_with_key_padding() {
    let file = answers();
    let layer = multi_head(&Params::new(&file, "mha_key_padding"), 4);
    let (x, context) = (file.floats("mha_key_padding.in.x"), file.floats("mha_key_padding.in.context"));
    let drop = file.bytes("mha_key_padding.in.drop");
    let [batch, keys] = file.shape("mha_key_padding.in.drop");
    let input = MultiHeadInput::new(&x, sequences(&file, "mha_key_padding.in.x"))
        .memory(&context, sequences(&file, "mha_key_padding.in.context"));
    let mask = Mask::drop(View::bhld(&drop, [batch, 1, 1, keys]).unwrap());
    check_multi_head(&file, "mha_key_padding", &layer, input.mask(mask));
    // The same, said by lengths, if padding comes last.
    let lens: Vec<usize> = drop.chunks_exact(keys).map(|row| row.iter().filter(|&&drop| drop == 0).count()).collect();
    if drop.chunks_exact(keys).all(|row| row.is_sorted()) {
        check_multi_head(&file, "mha_key_padding", &layer, input.kv_lens(&lens));
    }
}

#[test]
fn multi_head_attention_with_widths_of_its_own_for_keys_and_values() {
    let file = answers();
    let [_, heads, ..] = file.shape::<4>("mha_kdim_vdim.out.weights");
    let layer = multi_head(&Params::new(&file, "mha_kdim_vdim"), heads);
    let [x, k, v] = ["x", "k", "v"].map(|name| file.floats(&format!("mha_kdim_vdim.in.{name}")));
    let input = MultiHeadInput::new(&x, sequences(&file, "mha_kdim_vdim.in.x")).keys_and_values(
        &k,
        &v,
        sequences(&file, "mha_kdim_vdim.in.k"),
    );
    check_multi_head(&file, "mha_kdim_vdim", &layer, input);
}

#[test]
fn encoder_layers() {
    let file = answers();
    for (name, order, activation) in [
        ("encoder_post_norm_gelu", NormOrder::Post, Activation::Gelu),
        ("encoder_pre_norm_relu", NormOrder::Pre, Activation::Relu),
    ] {
        let layer = encoder_layer(&Params::new(&file, name), 4, order, activation);
        let x = format!("{name}.in.x");
        let (rows, sequences) = (file.floats(&x), sequences(&file, &x));
        check(&file, [&format!("{name}.out.y")], |[out], compute| {
            layer.forward(LayerInput::new(&rows, sequences), out, compute).unwrap();
        });
    }
}

#[test]
fn decoder_layer_with_a_memory() {
    let file = answers();
    let name = "decoder_post_norm_relu";
    let layer = decoder_layer(&Params::new(&file, name), 4, NormOrder::Post, Activation::Relu);
    let [x, memory] = ["x", "memory"].map(|tensor| format!("{name}.in.{tensor}"));
    let (rows, memory_rows) = (file.floats(&x), file.floats(&memory));
    check(&file, [&format!("{name}.out.y")], |[out], compute| {
        let memory = LayerInput::new(&memory_rows, sequences(&file, &memory));
        let x = LayerInput::new(&rows, sequences(&file, &x));
        layer.forward_with_memory(x, memory, out, compute).unwrap();
    });
}

/// The last hidden states, those after the first layer, and the weights of its attention.
fn check_model(file: &Fixture, name: &str, model: &crate::models::Model) {
    let names = ["last", "hidden.1", "weights.0"].map(|part| format!("{name}.out.{part}"));
    let tokens = file.tokens(&format!("{name}.in.ids"));
    let [batch, len] = file.shape(&format!("{name}.in.ids"));
    let sequences = Sequences::Even { batch, len };
    let shape = file.shape(&names[2]);
    check(file, names.each_ref().map(|name| &name[..]), |[last, hidden, weights], compute| {
        let mut x = vec![f32::NAN; hidden.len()];
        model.embed(&tokens, sequences, &mut x, compute);
        model.transformer.forward(LayerInput::new(&x, sequences), last, compute).unwrap();
        model.transformer.layers()[0].forward(LayerInput::new(&x, sequences), hidden, compute).unwrap();

        let (attention, norm) = &model.first;
        let (mut normed, mut out) = (x.clone(), x.clone());
        norm.forward(&x, &mut normed, compute).unwrap();
        let weights = ViewMut::bhld(weights, shape).unwrap();
        attention.forward_with_weights(MultiHeadInput::new(&normed, sequences), &mut out, weights, compute).unwrap();
    });
}

#[test]
fn gpt2_of_two_layers() {
    let file = answers();
    check_model(&file, "gpt2", &gpt2(&Params::new(&file, "gpt2")));
}

#[test]
fn llama_of_two_layers() {
    let file = answers();
    check_model(&file, "llama", &llama(&Params::new(&file, "llama")));
}
