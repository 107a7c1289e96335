//! Safe wrapper of `matrixmultiply`'s sgemm, for the unfused baseline. The fused path never calls it.

/// Matrix inside a slice: element `[i, j]` is `data[i·strides.0 + j·strides.1]`.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// Slice from element `[0, 0]` on.
    pub data: &'a [f32],
    /// Distances, in elements, from one row and from one column to the next.
    pub strides: (usize, usize),
}

/// Computes `c ← alpha · a · b`, with `a` `m × k`, `b` `k × n`, `c` `m × n` and dense.
///
/// # Panics
/// If a slice is too short.
pub fn sgemm([m, k, n]: [usize; 3], alpha: f32, a: Matrix<'_>, b: Matrix<'_>, c: &mut [f32]) {
    let fits = |rows: usize, cols: usize, x: &Matrix<'_>| {
        let last = |n: usize, stride: usize| if n == 0 { Some(0) } else { (n - 1).checked_mul(stride) };
        let reach = last(rows, x.strides.0).zip(last(cols, x.strides.1)).and_then(|(a, b)| a.checked_add(b));
        let strides_fit = x.strides.0.max(x.strides.1) <= isize::MAX as usize;
        rows == 0 || cols == 0 || strides_fit && reach.is_some_and(|reach| reach < x.data.len())
    };
    let holds = m.checked_mul(n).is_some_and(|size| size <= c.len());
    assert!(fits(m, k, &a) && fits(k, n, &b) && holds, "sgemm: a slice is too short for its shape");
    if m == 0 || n == 0 {
        // `matrixmultiply` would loop over the rows of an empty matrix.
        return;
    }
    // SAFETY: every element of the three matrices lies inside its slice, and `c` is borrowed exclusively.
    unsafe {
        matrixmultiply::sgemm(
            m,
            k,
            n,
            alpha,
            a.data.as_ptr(),
            a.strides.0 as isize,
            a.strides.1 as isize,
            b.data.as_ptr(),
            b.strides.0 as isize,
            b.strides.1 as isize,
            0.0,
            c.as_mut_ptr(),
            n as isize,
            1,
        );
    }
}
