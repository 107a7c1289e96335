use super::*;
use crate::attention::call::options::{Options, Ragged};
use crate::attention::call::visibility::{Alignment, Visible};
use crate::kv::source::KeyValues;
use crate::tensor::any::Tensor;
use crate::tensor::element::Precision;
use crate::tensor::view::View;
use crate::tensor::view_mut::ViewMut;

/// Calls `f` with a call of ragged sequences of some rows and no keys, with `group` query heads for each of two key/value heads.
fn with_ragged(lens: &[usize], group: usize, f: impl FnOnce(&Call<'_>)) {
    let ends = |lens: &mut dyn Iterator<Item = usize>| {
        let mut ends = vec![0];
        ends.extend(lens.scan(0, |end, len| {
            *end += len;
            Some(*end)
        }));
        ends
    };
    let (q, k) = (ends(&mut lens.iter().copied()), vec![0; lens.len() + 1]);
    let view = |heads, rows| -> Tensor<'_> {
        View::from_strides(&[0.5f32; 16], 0, [1, heads, rows, 16], [0, 0, 0, 1]).unwrap().into()
    };
    let options = Options { ragged: Some(Ragged { q: &q, k: Some(&k) }), ..Options::default() };
    let (visible, alignment, precision) = (Visible::default(), Alignment::TopLeft, Precision::Exact);
    let kv = KeyValues::of_tensors(view(2, 0), view(2, 0)).unwrap();
    f(&Call { q: view(2 * group, q[lens.len()]), kv, scale: 1.0, visible, alignment, options, precision });
}

/// Returns the row sets of all tasks, in the order of the rows.
fn tasks(call: &Call<'_>, schedule: &Schedule<'_>) -> Vec<RowSet<'static>> {
    let task = |number| match schedule.work(call, number) {
        Work::Rows(rows) => rows,
        work => panic!("{work:?}"),
    };
    (0..schedule.len()).rev().map(task).collect()
}

/// Numbers of rows of some sequences, of which `none` in 8 have none.
fn lens(seed: usize, sequences: usize, none: usize) -> Vec<usize> {
    let mixed = |n: usize| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) & 0xffff;
    let len = |n: usize| if mixed(n) % 8 < none { 0 } else { [1, 1, 3, 17, 40, 200][mixed(n + 1) % 6] };
    (0..sequences).map(|sequence| len(2 * (seed * 64 + sequence))).collect()
}

#[test]
fn tasks_have_each_row_once_and_follow_the_rows() {
    for seed in 0..300 {
        let (group, sequences, task_rows) =
            ([1, 2, 5][seed % 3], [1, 2, 7, 40][seed / 3 % 4], [1, 6, 32, 96][seed % 4]);
        let lens = lens(seed, sequences, [0, 4, 7, 8][seed / 7 % 4]);
        let what = format!("{lens:?} rows, {group} heads, tasks of {task_rows}");
        with_ragged(&lens, group, |call| {
            let tiling = Tiling::new(16, 16, task_rows, 1);
            let weights = || ViewMut::bhld(&mut [], [0, 0, 0, 0]).unwrap();
            let schedules =
                [Outputs::NONE, Outputs::NONE.weights(weights())].map(|of| Schedule::new(call, &of, &tiling, None));
            for schedule in &schedules {
                let (mut next, mut begun) = ((0, 0, 0), Vec::new());
                for RowSet { sequence, kv_head, rows, .. } in tasks(call, schedule) {
                    if rows.start == 0 {
                        begun.push((kv_head, sequence));
                    }
                    if rows.is_empty() {
                        continue;
                    }
                    assert!(rows.len() <= task_rows && rows.end <= group * lens[sequence], "{what}");
                    let place = (kv_head, sequence, rows.start);
                    assert!(next <= place, "{what}: {place:?} after {next:?}");
                    // What is left out has no rows.
                    let left = (next.0..=kv_head).flat_map(|head| (0..sequences).map(move |sequence| (head, sequence)));
                    let left = left.filter(|&at| (next.0, next.1) <= at && at < (kv_head, sequence));
                    let left: usize = left.map(|(_, sequence)| lens[sequence]).sum();
                    assert_eq!((left, rows.start), (0, if next.2 > 0 { next.2 } else { 0 }), "{what}");
                    next = match rows.end < group * lens[sequence] {
                        true => (kv_head, sequence, rows.end),
                        false => (kv_head, sequence + 1, 0),
                    };
                }
                let rest: usize = (0..2usize)
                    .flat_map(|head| lens.iter().enumerate().map(move |(n, len)| ((head, n), len)))
                    .filter(|&(at, _)| at >= (next.0, next.1))
                    .map(|(_, len)| len)
                    .sum();
                assert_eq!((rest, next.2), (0, 0), "{what}");
                if schedule.listed == Listed::All {
                    let all: Vec<_> =
                        (0..2).flat_map(|head| (0..sequences).map(move |sequence| (head, sequence))).collect();
                    assert_eq!(begun, all, "{what}");
                }
            }
            let rows: usize = lens.iter().sum();
            let most = 2 * (group * rows / task_rows + sequences.min(rows));
            assert!(schedules[0].tasks() <= most, "{what}: {} tasks", schedules[0].tasks());
        });
    }
}

/// One row of one of a million sequences.
#[test]
fn sequences_without_rows_have_no_tasks() {
    for at in [0, 1, 500_000, (1 << 20) - 1] {
        let mut lens = vec![0; 1 << 20];
        lens[at] = 1;
        with_ragged(&lens, 3, |call| {
            let schedule = Schedule::new(call, &Outputs::NONE, &Tiling::new(16, 16, 96, 1), None);
            let tasks = tasks(call, &schedule);
            assert_eq!(
                tasks.iter().map(|set| (set.sequence, set.rows.clone())).collect::<Vec<_>>(),
                vec![(at, 0..3); 2]
            );
        });
    }
}
