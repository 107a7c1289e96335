//! Caches of all layers of a model: changed together or not at all.

use crate::kv_support::same_cache;
use crate::support::{Rng, Tensor};
use core::num::NonZeroUsize;
use sdpa::{Dtype, Error, Int4, KvCache, KvShape, LayerCaches};

/// Layers of different sizes and formats, with two sequences; the last one slides.
fn layers() -> Vec<KvCache> {
    let new =
        |kv_heads, head_dim, value_dim| KvCache::new(2, KvShape { kv_heads, head_dim, value_dim }).expect("a cache");
    let sliding = KvShape { kv_heads: 1, head_dim: 8, value_dim: 8 };
    vec![
        new(2, 16, 16).dtype(Dtype::Bf16).expect("an empty cache"),
        new(1, 48, 32).latent().and_then(|cache| cache.int4(Int4::Centred)).expect("an empty cache"),
        KvCache::sliding(2, sliding, NonZeroUsize::new(64).expect("some"), 0).expect("a cache"),
    ]
}

/// Appends tokens to a sequence of a layer.
fn append(cache: &mut KvCache, sequence: usize, n: usize, seed: u64) {
    let KvShape { kv_heads, head_dim, value_dim } = cache.shape();
    let [k, v] = [head_dim, value_dim].map(|dim| Tensor::normal([1, kv_heads, n, dim], &mut Rng::new(seed)));
    let latent = k.view().columns(0..value_dim.min(head_dim)).expect("it has these");
    let v = if cache.is_latent() { latent } else { v.view() };
    cache.append_to(sequence, k.view(), v).expect("they fit");
}

#[track_caller]
fn same(what: &str, got: &LayerCaches, expected: &[KvCache]) {
    assert_eq!(got.layers().len(), expected.len());
    for (layer, (got, expected)) in got.layers().iter().zip(expected).enumerate() {
        same_cache(&format!("{what}, layer {layer}"), got, expected);
    }
    assert_eq!(got.bytes(), got.layers().iter().map(KvCache::bytes).sum::<usize>());
}

#[test]
fn what_happens_to_all_layers_happens_to_each() {
    let (mut caches, mut alone) = (LayerCaches::new(layers()).expect("caches"), layers());
    for (layer, alone) in alone.iter_mut().enumerate() {
        for (sequence, n) in [(0, 300), (0, 20), (1, 40)] {
            append(caches.layer_mut(layer).expect("a layer"), sequence, n, n as u64);
            append(alone, sequence, n, n as u64);
        }
    }
    assert_eq!([caches.len(0), caches.len(1)], [Ok(320), Ok(40)]);
    assert_eq!(caches.lens().collect::<Vec<_>>(), [320, 40]);
    assert_eq!(caches.bytes_for(320), alone.iter().map(|alone| alone.bytes_for(320)).sum::<usize>());
    same("appended", &caches, &alone);
    caches.keep(0, 300, &[1, 3, 19]).expect("they have these");
    caches.truncate(1, 33).expect("it is shorter");
    assert_eq!(caches.add_sequence(), 2);
    caches.fork(0, 2).expect("sequences");
    caches.remove_sequence(1).expect("a sequence");
    for alone in &mut alone {
        alone.keep(0, 300, &[1, 3, 19]).expect("it has these");
        alone.truncate(1, 33).expect("it is shorter");
        assert_eq!(alone.add_sequence(), 2);
        alone.fork(0, 2).expect("sequences");
        alone.remove_sequence(1).expect("a sequence");
    }
    same("changed", &caches, &alone);
    let before = caches.bytes();
    caches.shrink();
    assert!(caches.bytes() < before, "{} of {before} bytes", caches.bytes());
    same("shrunk", &caches, &alone);
    #[cfg(feature = "safetensors")]
    {
        let file = caches.export().expect("a file");
        let imported = LayerCaches::import(&file).expect("its file");
        same("imported", &imported, &alone);
        assert_eq!(imported.len(1), Err(Error::Removed { argument: "sequence", sequence: 1 }));
        assert_eq!(
            KvCache::import(&file).expect_err("of several caches").to_string(),
            "import: the file does not describe a cache: there are no metadata \"sdpa.kv_cache\""
        );
        assert!(LayerCaches::import(&alone[0].export().expect("a file")).is_err());
        let swapped = caches.export_sequence(2).expect("a file");
        caches.clear(2).expect("a sequence");
        assert_eq!(caches.lens().collect::<Vec<_>>(), [303, 0, 0]);
        caches.import_sequence(2, &swapped).expect("its file");
        same("swapped", &caches, &alone);
        assert!(caches.import_sequence(2, &swapped).is_err() && caches.import_sequence(0, &file).is_err());
        let fewer = LayerCaches::new(layers()[..2].to_vec()).expect("caches").export_sequence(0).expect("a file");
        assert_eq!(
            caches.import_sequence(2, &fewer).expect_err("of two layers").to_string(),
            "file: number of layers is 2, but the model has 3"
        );
        same("refused", &caches, &alone);
    }
}

#[test]
fn a_step_that_ended_early_is_rolled_back() {
    let mut caches = LayerCaches::new(layers()).expect("caches");
    for layer in 0..3 {
        append(caches.layer_mut(layer).expect("a layer"), 0, 100, 1);
    }
    let expected = caches.layers().to_vec();
    for reached in 0..3 {
        for layer in 0..reached {
            append(caches.layer_mut(layer).expect("a layer"), 0, 7, 2);
            append(caches.layer_mut(layer).expect("a layer"), 1, 300, 3);
        }
        assert_eq!([caches.len(0), caches.len(1)], [Ok(100), Ok(0)]);
        caches.roll_back().expect("of the last append");
        same("rolled back", &caches, &expected);
    }
}

#[test]
fn what_one_layer_refuses_changes_none() {
    let mut caches = LayerCaches::new(layers()).expect("caches");
    for layer in 0..3 {
        let layer = caches.layer_mut(layer).expect("a layer");
        append(layer, 0, 700, 1);
        append(layer, 0, 1, 2);
    }
    let expected = caches.layers().to_vec();
    // The last layer has evicted what the next row would see.
    let refused = [
        caches.truncate(0, 300),
        caches.keep(0, 300, &[2, 4]),
        caches.truncate(0, 702),
        caches.fork(0, 2),
        caches.remove_sequence(2),
        caches.clear(2),
        caches.keep(0, 690, &[3, 2]),
        caches.layer_mut(3).map(drop),
    ];
    assert_eq!(
        refused[7].as_ref().map_err(ToString::to_string),
        Err("layer: index is 3, but must be at most 2, the last layer".to_string())
    );
    assert!(refused.iter().all(Result::is_err), "{refused:?}");
    same("refused", &caches, &expected);
    let said = |layers: Vec<KvCache>| LayerCaches::new(layers).expect_err("a mistake").to_string();
    assert_eq!(said(Vec::new()), "layers: number of caches is 0, but must be at least 1");
    let mut uneven = layers();
    uneven[1].add_sequence();
    assert_eq!(said(uneven), "a layer: number of sequences is 3, but the first layer has 2");
    let mut removed = layers();
    removed[2].remove_sequence(1).expect("a sequence");
    assert_eq!(said(removed), "layers: sequence 1 was removed");
}
