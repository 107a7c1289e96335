//! Slots of a pool and positions of a sequence: random tables against a search of all keys, pages that are shared or held twice,
//! refusals, and the lists of a server.

use crate::kv_support::{Pool, same_full};
use crate::options::{Case, Wanted};
use crate::support::{Layout, Rng, execs, fewer};
use sdpa::{BlockTable, Inputs, PageError, Rectangle, SelectedKeys, SelectionShape, SlotIndex, View};

/// A table of random pages; some are shared, and some of one sequence twice.
struct Table {
    entries: Vec<u32>,
    lens: Vec<usize>,
    page_size: usize,
}

impl Table {
    fn random(rng: &mut Rng) -> Self {
        let (sequences, width, page_size) = (1 + rng.below(4), rng.below(9), rng.pick(&[1, 3, 16, 64]));
        let pages = rng.pick(&[2, 2 * width + 1, 1000]);
        Self {
            entries: (0..sequences * width).map(|_| rng.below(pages) as u32).collect(),
            lens: (0..sequences).map(|_| rng.below(width * page_size + 1)).collect(),
            page_size,
        }
    }

    fn table(&self) -> BlockTable<'_> {
        BlockTable { entries: &self.entries, lens: &self.lens }
    }

    /// The slot of every position of a sequence.
    fn slots(&self, sequence: usize) -> Vec<i32> {
        let row = &self.entries[sequence * (self.entries.len() / self.lens.len())..];
        let of = |p: usize| row[p / self.page_size] as usize * self.page_size + p % self.page_size;
        (0..self.lens[sequence]).map(|p| of(p) as i32).collect()
    }
}

#[test]
fn slots_are_positions_and_back() {
    let (mut index, mut twice, mut absent, mut beyond) = (SlotIndex::new(), 0, 0, 0);
    for seed in 0..fewer(2000) {
        let rng = &mut Rng::new(seed ^ 0x5107);
        let table = Table::random(rng);
        for sequence in 0..table.lens.len() {
            let (len, all) = (table.lens[sequence], table.slots(sequence));
            index.fill(table.table(), table.page_size, sequence).expect("a good table");
            let n = rng.below(30);
            let some = |rng: &mut Rng| if len == 0 || rng.below(5) == 0 { -1 } else { rng.below(len) as i32 };
            let positions: Vec<i32> = (0..n).map(|_| some(rng)).collect();
            let (mut slots, mut back) = (vec![7; n], vec![7; n]);
            index.slots(&positions, &mut slots).expect("positions of the sequence");
            let expected = |&p: &i32| usize::try_from(p).map_or(-1, |p| all[p]);
            assert_eq!(slots, positions.iter().map(expected).collect::<Vec<_>>(), "seed {seed}");
            let once = slots.iter().all(|slot| all.iter().filter(|known| *known == slot).count() < 2);
            let translated = index.positions(&slots, &mut back);
            assert_eq!(translated.is_ok(), once, "seed {seed}: {translated:?}");
            assert!(!once || back == positions, "seed {seed}");
            // Every slot near those of the sequence, and some that are in no page.
            for slot in all.iter().flat_map(|&slot| [slot, slot + 1, slot - 1, slot ^ 64]).filter(|&slot| slot >= 0) {
                let known: Vec<usize> = (0..len).filter(|&p| all[p] == slot).collect();
                let got = index.positions(&[slot], &mut [7]).map(|()| known.len());
                match (got, &known[..]) {
                    (Ok(1), [_]) => {}
                    (Err(PageError::Slot { sequence: s, place: 0, got }), []) => {
                        assert_eq!((s, got), (sequence, slot));
                        absent += 1;
                    }
                    (Err(PageError::SlotBeyond { position, len: l, got, .. }), []) => {
                        assert!(
                            got == slot
                                && l == len
                                && position >= len
                                && position / table.page_size == (len - 1) / table.page_size
                        );
                        beyond += 1;
                    }
                    (Err(PageError::SlotTwice { positions, got, .. }), [first, second, ..]) => {
                        assert_eq!((positions, got), ([*first, *second], slot));
                        twice += 1;
                    }
                    (got, known) => panic!("seed {seed}, slot {slot}, positions {known:?}: {got:?}"),
                }
            }
        }
    }
    assert!(twice > 0 && absent > 0 && beyond > 0);
}

#[test]
fn sequences_share_pages() {
    // Both begin with page 5; the second goes on in page 0, the first in page 2.
    let table = BlockTable { entries: &[5, 2, 5, 0], lens: &[7, 5] };
    let mut index = SlotIndex::new();
    for (sequence, other, slot) in [(0, 0, 2 * 4 + 2), (1, 2 * 4, 0)] {
        index.fill(table, 4, sequence).unwrap();
        let mut positions = [0; 3];
        index.positions(&[slot, 5 * 4 + 3, -1], &mut positions).unwrap();
        assert_eq!(positions, [if sequence == 0 { 6 } else { 4 }, 3, -1]);
        let error = index.positions(&[-1, other], &mut [0; 2]).unwrap_err();
        assert_eq!(error, PageError::Slot { sequence, place: 1, got: other });
    }
}

/// Asserts what is said about the translation of a list of slots, and of one of positions.
fn refused(index: &SlotIndex, list: &[i32], slots: &str, positions: &str) {
    let mut to = vec![0; list.len()];
    assert_eq!(index.positions(list, &mut to).unwrap_err().to_string(), slots);
    assert_eq!(index.slots(list, &mut to).unwrap_err().to_string(), positions);
}

#[test]
fn refusals() {
    let mut index = SlotIndex::new();
    // Page 3 twice; the last page is used by half.
    index.fill(BlockTable { entries: &[3, 1, 3, 9], lens: &[14] }, 4, 0).unwrap();
    refused(
        &index,
        &[4, 15],
        "slots: place 1 is 15, which is both position 3 and position 11 of sequence 0",
        "positions: place 1 is 15, but sequence 0 has 14 keys",
    );
    refused(
        &index,
        &[-1, -2],
        "slots: place 1 is -2, which is in no page of sequence 0",
        "positions: place 1 is -2, but sequence 0 has 14 keys",
    );
    refused(
        &index,
        &[38],
        "slots: place 0 is 38, which is position 14, but sequence 0 has 14 keys",
        "positions: place 0 is 38, but sequence 0 has 14 keys",
    );
    refused(
        &index,
        &[i32::MAX],
        "slots: place 0 is 2147483647, which is in no page of sequence 0",
        "positions: place 0 is 2147483647, but sequence 0 has 14 keys",
    );
    let error = index.slots(&[1, 2], &mut [0]).unwrap_err();
    assert_eq!(error.to_string(), "slots: the buffer has 1 places, but 2 numbers are translated");
    let error = index.positions(&[], &mut [0]).unwrap_err();
    assert_eq!(error.to_string(), "positions: the buffer has 1 places, but 0 numbers are translated");
    // Half a page held twice has no second position beyond the length.
    index.fill(BlockTable { entries: &[3, 3], lens: &[6] }, 4, 0).unwrap();
    let mut positions = [0; 2];
    index.positions(&[14, 15], &mut positions).unwrap();
    assert_eq!(positions, [2, 3]);
    assert!(matches!(index.positions(&[13], &mut [0]), Err(PageError::SlotTwice { positions: [1, 5], .. })));
}

#[test]
fn tables_that_are_refused() {
    let mut index = SlotIndex::new();
    let mut says = |entries: &[u32], lens: &[usize], page_size: usize, sequence: usize, words: &str| {
        index.fill(BlockTable { entries: &[4], lens: &[2] }, 2, 0).unwrap();
        let error = index.fill(BlockTable { entries, lens }, page_size, sequence).unwrap_err();
        assert_eq!(error.to_string(), words);
        assert!(index.positions(&[8], &mut [0]).is_err() && index.slots(&[0], &mut [0]).is_err(), "not empty: {words}");
    };
    says(&[1, 2], &[3, 3], 4, 2, "block table: there is no sequence 2, the table has 2");
    says(&[], &[], 4, 0, "block table: there is no sequence 0, the table has 0");
    says(&[1, 2, 3], &[3, 3], 4, 0, "block table: 3 entries cannot be shared out evenly over 2 sequences");
    says(&[1, 2], &[3, 5], 4, 1, "block table: sequence 1 has 5 keys, but its 1 entries of 4 have room for 4");
    says(&[1], &[1], 0, 0, "pages: the page size is 0, but sequence 0 of the block table has 1 keys");
    let most = "but a slot is an i32, at most 2147483647";
    says(&[1 << 29], &[1], 4, 0, &format!("block table: the last slot of sequence 0 is 2147483651, {most}"));
    says(
        &[u32::MAX],
        &[1],
        usize::MAX,
        0,
        &format!("block table: the last slot of sequence 0 is {}, {most}", usize::MAX),
    );
    says(
        &[0],
        &[(1 << 31) + 1],
        1 << 32,
        0,
        "block table: the last position of sequence 0 is 2147483648, but a position is an i32, at most 2147483647",
    );
    // The other sequence and entries that are not needed may be anything.
    assert!(index.fill(BlockTable { entries: &[1, u32::MAX, 2, 3], lens: &[4, 99] }, 4, 0).is_ok());
    // Nothing is in a sequence without keys, of pages of any size.
    for page_size in [0, 4] {
        index.fill(BlockTable { entries: &[1], lens: &[0] }, page_size, 0).unwrap();
        assert!(index.positions(&[4], &mut [0]).is_err() && index.positions(&[-1], &mut [0]).is_ok());
    }
}

/// A server's lists of slots, by falling scores with −1 behind, make the call that lists of positions make.
#[test]
fn lists_of_slots_over_pages() {
    for seed in 0..fewer(12) {
        let rng = &mut Rng::new(seed ^ 0x5e47);
        let (rows, keys, places) = (rng.pick(&[1, 3, 17]), rng.pick(&[40, 300, 700]), 32);
        let case = Case::plain(rng, [2, 4, 2, rows, keys, 32, 32]);
        let page_size = rng.pick(&[16, 64]);
        let pool = Pool::of(&case, page_size, [Layout::Bhld; 2], f32::NAN, rng);
        let (mut slots, mut numbers) = (Vec::new(), vec![0; 2 * rows * places]);
        let (mut starts, mut ascending, mut index) = (vec![0], Vec::new(), SlotIndex::new());
        for (sequence, numbers) in numbers.chunks_mut(rows * places).enumerate() {
            index.fill(BlockTable { entries: &pool.entries, lens: &pool.lens }, page_size, sequence).unwrap();
            let mut positions = Vec::new();
            for row in 0..rows {
                let list: Vec<i32> = (0..keys as i32).filter(|_| rng.below(keys) < 20).take(places).collect();
                ascending.extend(list.iter().map(|&n| n as u32));
                starts.push(ascending.len());
                positions.extend(list.into_iter().rev());
                positions.resize((row + 1) * places, -1);
            }
            slots.resize(positions.len(), 0);
            index.slots(&positions, &mut slots).unwrap();
            index.positions(&slots, numbers).unwrap();
        }
        let shape = SelectionShape { q_lens: &[rows; 2], heads: 1, rows: 1, unit: 1 };
        let rectangle = Rectangle::new(View::bhld(&numbers, [2, 1, rows, places]).unwrap());
        let [mut by_slots, mut by_positions] = [SelectedKeys::new(), SelectedKeys::new()];
        by_slots.fill_padded(shape, &[keys; 2], rectangle, None).unwrap();
        by_positions.fill(shape, &starts, &ascending, None).unwrap();
        for (isa, exec) in execs() {
            let run = |selected: &SelectedKeys| {
                let case = Case { selected: Some(selected.clone()), ..case.clone() };
                case.run_over(Inputs::paged(case.q.view(), pool.pages()), exec, Wanted::LEAST)
            };
            same_full(&format!("seed {seed}, {isa}"), &run(&by_slots), &run(&by_positions));
        }
    }
}
