//! Queries, keys and values are not copied.

#[path = "../../../tests/support/counting.rs"]
mod counting;

use burn_tensor::ops::AttentionModuleOptions;
use burn_tensor::{Device, Distribution, Tensor};

/// On one thread, so that the counter sees everything: the output is the only memory that grows with the sizes.
#[test]
fn nothing_but_the_output_is_allocated() {
    let normal = |heads| Tensor::<4>::random([1, 600, heads, 64], Distribution::Default, &Device::default());
    let options = AttentionModuleOptions { scale: None, softcap: None, is_causal: true };
    // As projections leave them: batch, rows, heads, dim.
    let [q, k, v] = [12, 4, 4].map(|heads| normal(heads).swap_dims(1, 2));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
    let (calls, bytes) = pool.install(|| {
        let mut counted = (0, 0);
        for _ in 0..2 {
            let [q, k, v] = [&q, &k, &v].map(Tensor::clone);
            counted =
                counting::counted(|| drop(sdpa_burn::attention(q, k, v, None, None, options).expect("a good call")));
        }
        counted
    });
    let output = 12 * 600 * 64 * size_of::<f32>();
    // Scratch of a thread is at most a mebibyte; a copy of the queries would be as large as the output.
    assert!(
        (output..output + (1 << 20)).contains(&bytes),
        "{bytes} bytes in {calls} allocations, {output} of them out"
    );
}
