//! Bytes that are said to be held: those that were asked for.

use crate::counting::counted;
use sdpa::parts::BlockStates;
use sdpa::{Attention, CacheFormat, Dtype, Exec, Inputs, Int4, KvShape, PagePool, View};

/// Beside what is counted there are a few lists of workers and of heads.
fn assert_held(bytes: usize, asked: usize) {
    assert!((asked - 512..=asked).contains(&bytes), "{bytes} bytes of {asked}");
}

#[test]
fn states_of_blocks_say_what_they_hold() {
    let x = [0.5f32; 16];
    let view = |sequences, rows| View::from_strides(&x, 0, [sequences, 2, rows, 16], [0, 0, 0, 1]).unwrap();
    for [sequences, rows, keys] in [[1, 1, 256], [3, 5, 700], [40, 1, 300]] {
        let mut blocks = BlockStates::new();
        assert_eq!(blocks.bytes(), 0);
        let inputs = Inputs::new(view(sequences, rows), view(sequences, keys), view(sequences, keys));
        let (_, asked) = counted(|| blocks.compute(&Attention::new(), inputs, 0, Exec::serial()).unwrap());
        assert_held(blocks.bytes(), asked);
    }
}

#[test]
fn pools_say_what_they_hold() {
    let shape = KvShape { kv_heads: 2, head_dim: 16, value_dim: 48 };
    for format in [CacheFormat::Elements(Dtype::F16), CacheFormat::Int8PerToken, CacheFormat::Int4(Int4::Centred)] {
        let mut pool = None;
        let (_, asked) = counted(|| pool = Some(PagePool::new(9, 32, shape, format).unwrap()));
        assert_held(pool.unwrap().bytes(), asked);
    }
    // Beside the elements there is room to begin with a cache line.
    let floats = PagePool::new(9, 32, shape, CacheFormat::Elements(Dtype::F32)).unwrap();
    assert_held(9 * 32 * 2 * (16 + 48) * 4, floats.bytes());
}
