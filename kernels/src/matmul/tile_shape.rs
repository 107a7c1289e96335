//! Register tile shapes as constants.

/// Number of rows of the largest register tile of any instruction set.
pub(crate) const MAX_TILE_ROWS: usize = 6;

/// Number of vectors of the widest register tile of any instruction set.
pub(crate) const MAX_TILE_VECS: usize = 4;

/// Calls a tile function with its shape as constants: up to 6 rows, up to 4 vectors, bounded by what the backend's
/// registers hold (`most` rows and vectors, if not the usual numbers) so that no larger tile is compiled for it. This
/// is the one place where shapes become const generics. Every called function is inlined, and compile time grows more
/// than in proportion to the inlined code: so each tile function has one call in one place, and no shape that never
/// occurs.
macro_rules! by_tile_shape {
    ($S:ty, $rows:expr, $vecs:expr, |$MR:ident, $NV:ident| $call:expr) => {
        by_tile_shape!($rows, $vecs, most [<$S as Simd>::TILE_ROWS, <$S as Simd>::TILE_VECS], |$MR, $NV| $call)
    };
    ($rows:expr, $vecs:expr, most $most:expr, |$MR:ident, $NV:ident| $call:expr) => {
        by_tile_shape!(@rows $rows, $vecs, $most, $MR, $NV, $call, 1 2 3 4 5 6)
    };
    (@rows $rows:expr, $vecs:expr, $most:expr, $MR:ident, $NV:ident, $call:expr, $($mr:literal)*) => {
        match $rows {
            $($mr if $mr <= $most[0] => {
                const $MR: usize = $mr;
                by_tile_shape!(@vecs $vecs, $most, $NV, $call, 1 2 3 4)
            })*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
    (@vecs $vecs:expr, $most:expr, $NV:ident, $call:expr, $($nv:literal)*) => {
        match $vecs {
            $($nv if $nv <= $most[1] => {
                const $NV: usize = $nv;
                $call
            })*
            vecs => unreachable!("a tile of {vecs} vectors"),
        }
    };
}
