//! 38–41: block tables and pools that do not fit.

use super::{Mistake, call, floats, mistake, outcome};
use sdpa::{Attention, BlockTable, Inputs, Pages};

pub(super) fn mistakes() -> Vec<Mistake> {
    // Six pages of four keys, two heads, dims 3 and 5; two sequences of three entries.
    let pages = |entries: &[u32], lens: &[usize], size: usize| {
        outcome(Pages::new(floats([6, 2, size, 3]), floats([6, 2, size, 5]), BlockTable { entries, lens }))
    };
    let table = BlockTable { entries: &[5, 0, 3, 1, 2, 4], lens: &[12, 9] };
    let pool = Pages::new(floats([6, 2, 4, 3]), floats([6, 2, 4, 5]), table).unwrap();
    vec![
        mistake(
            38,
            "page table entry beyond the pool",
            pages(&[5, 0, 3, 1, 6, 4], &[12, 9], 4),
            "block table: entry 1 of sequence 1 is page 6, but the pool has 6 pages",
        ),
        mistake(
            39,
            "length beyond the table",
            pages(table.entries, &[12, 13], 4),
            "block table: sequence 1 has 13 keys, but its 3 entries of 4 have room for 12",
        ),
        mistake(
            40,
            "page size 0",
            pages(table.entries, &[0, 9], 0),
            "pages: the page size is 0, but sequence 1 of the block table has 9 keys",
        ),
        mistake(
            41,
            "pool of another head_dim",
            call(Attention::new(), Inputs::paged(floats([2, 2, 1, 4]), pool), [2, 2, 1, 5], &[]),
            "pages: head_dim is 3, but q has 4",
        ),
    ]
}
