//! A safe door to `matrixmultiply`'s sgemm, for the unfused baseline. Never on the fused path.

/// A matrix inside a slice: element `[i, j]` is `data[i·strides.0 + j·strides.1]`.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// The slice, from element `[0, 0]` on.
    pub data: &'a [f32],
    /// Elements from one row, and from one column, to the next.
    pub strides: (usize, usize),
}

/// `c ← alpha · a · b`, with `a` `m × k`, `b` `k × n`, `c` `m × n` and dense.
///
/// # Panics
/// If a slice is too short.
pub fn sgemm([m, k, n]: [usize; 3], alpha: f32, a: Matrix<'_>, b: Matrix<'_>, c: &mut [f32]) {
    let fits = |rows: usize, cols: usize, x: &Matrix<'_>| {
        rows == 0 || cols == 0 || (rows - 1) * x.strides.0 + (cols - 1) * x.strides.1 < x.data.len()
    };
    assert!(fits(m, k, &a) && fits(k, n, &b) && c.len() >= m * n, "sgemm: a slice is too short for its shape");
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
