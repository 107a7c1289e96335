//! Functions of the caller over rows and keys in pieces: they see positions among all.

use crate::support::{Rng, Tensor, assert_same_bits};
use sdpa::{Alignment, Attention, AttnState, Exec, Inputs, Mods, Outputs, Position, ViewMut};

/// Functions and stock masks see where keys and rows lie among all, also at the ends of what positions can be.
#[test]
fn functions_see_positions_among_all_keys() {
    let mut rng = Rng::new(1);
    let [q, k, v] = [3, 700, 700].map(|rows| Tensor::normal([1, 1, rows, 8], &mut rng));
    for offset in [0, 5, 690, -300, isize::MIN, isize::MIN + 300, isize::MAX] {
        let attention = Attention::new().align(Alignment::Offset(offset));
        let seen = std::sync::Mutex::new(Vec::new());
        let record = |score: f32, at: Position| {
            seen.lock().unwrap().push((at.row, at.key, at.position));
            score
        };
        let mods = Mods::new().score(record);
        let sorted = || {
            let mut all = core::mem::take(&mut *seen.lock().unwrap());
            all.sort_unstable();
            all
        };
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let mut out = vec![0.0; 24];
        fn outputs(out: &mut [f32]) -> Outputs<'_> {
            Outputs::new(ViewMut::bhld(out, [1, 1, 3, 8]).unwrap())
        }
        let run = sdpa::Run::new().mods(&mods);
        attention.problem(inputs, outputs(&mut out)).unwrap().run_once_with(Exec::serial(), run).unwrap();
        let (expected, expected_out) = (sorted(), out.clone());
        let mut state = AttnState::from_inputs(attention, inputs, Exec::serial()).unwrap().mods(&mods).unwrap();
        for keys in [0..100, 100..613, 613..700] {
            state.push(k.view().rows(keys.clone()).unwrap(), v.view().rows(keys).unwrap()).unwrap();
        }
        state.read(outputs(&mut out)).unwrap();
        assert_eq!((sorted(), out), (expected, expected_out), "offset {offset}");
    }
}

fn output(out: &mut Tensor) -> Outputs<'_> {
    Outputs::new(ViewMut::bhld(&mut out.data, out.shape).unwrap())
}

/// Functions of row, key, distance, batch and head see the positions of one call where rows are in pieces, whatever names the
/// place of the rows among the keys, if anything does.
#[test]
fn functions_of_rows_in_pieces_see_positions_among_all() {
    let mut rng = Rng::new(2);
    let shape = |rows| [2, 2, rows, 8];
    let [q, k, v] = [9, 300, 300].map(|rows| Tensor::normal(shape(rows), &mut rng));
    let seen = std::sync::Mutex::new(Vec::new());
    let record = |score: f32, at: Position| {
        seen.lock().unwrap().push((at.batch, at.head, at.row, at.key, at.position, at.distance));
        score + 0.1 * at.row as f32 * (at.key % 7) as f32
    };
    let mods = Mods::new().score(record);
    let sorted = || {
        let mut all = core::mem::take(&mut *seen.lock().unwrap());
        all.sort_unstable();
        all
    };
    for (alignment, offset) in [(None, 0), (Some(Alignment::TopLeft), 0), (Some(Alignment::Offset(-4)), -4)] {
        let with = |alignment: Option<Alignment>| alignment.map_or(Attention::new(), |at| Attention::new().align(at));
        let mut whole = Tensor::filled(shape(9), f32::NAN);
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let problem = with(alignment).problem(inputs, output(&mut whole)).unwrap();
        problem.run_once_with(Exec::serial(), sdpa::Run::new().mods(&mods)).unwrap();
        let expected = sorted();
        for rows in [0..2, 2..9] {
            // An offset is that of the first of these rows.
            let attention = match alignment {
                Some(Alignment::Offset(_)) => with(Some(Alignment::Offset(offset + rows.start as isize))),
                _ => with(alignment),
            };
            let inputs = Inputs::new(q.view().rows(rows.clone()).unwrap(), k.view(), v.view());
            let state = AttnState::from_inputs(attention, inputs, Exec::serial()).unwrap();
            let mut state = state.mods(&mods).unwrap().rows_from(rows.start).unwrap();
            for keys in [0..100, 100..300] {
                state.push(k.view().rows(keys.clone()).unwrap(), v.view().rows(keys).unwrap()).unwrap();
            }
            let mut out = Tensor::filled(shape(rows.len()), f32::NAN);
            state.finish(output(&mut out)).unwrap();
            assert_same_bits(&format!("{alignment:?}, {rows:?}"), &out, &whole.rows(rows));
        }
        assert!(sorted() == expected, "{alignment:?}: other positions");
    }
}
