//! Stock masks and what they are combined to: a definition of one line each, and the bits of a mask that is a tensor.

use crate::fuzzer::array::Array;
use crate::fuzzer::bits::{Recorder, settle, sizes};
use crate::fuzzer::case::{Case, Cover, Entries, Polarity};
use crate::fuzzer::draw::{Home, draw_at, draw_of};
use crate::fuzzer::functions::Functions;
use crate::fuzzer::oracle::Oracle;
use crate::fuzzer::outs::{Outs, Wanted};
use crate::fuzzer::rng::Rng;
use crate::fuzzer::stage::Stage;
use sdpa::masks::{Documents, PerSequence, PrefixLm};
use sdpa::{Alignment, BlockClass, BlockPosition, Error, Exec, MaskMod, Mods, Plan, Position, Run, Workspace};

/// A mask, and whether it keeps a pair, by its definition.
pub(super) struct Both {
    pub(super) stock: Box<dyn MaskMod>,
    pub(super) plain: Box<dyn Fn(Position) -> bool>,
    pub(super) what: String,
    /// Whether the mask may be that of the call.
    pub(super) fits: bool,
}

pub(super) fn check(rng: &mut Rng) {
    let home = Home::draw(rng);
    let mut case = draw_at(rng, home);
    case.functions = Functions::default();
    // Without an alignment the numbers of rows and keys are equal: then rows need no place.
    case.settings.alignment = case.settings.alignment.or(Some(Alignment::TopLeft));
    let (rows, keys) = case.longest();
    let both = draw(rng, case.batch(), keys.max(rows), 2);
    check_mask(rng, &case, home, &both);
}

/// What a call with a stock mask gives.
pub(super) fn bits(rng: &mut Rng, recorder: &mut Recorder) {
    let (home, sizes) = (Home::draw(rng), sizes(rng));
    let mut case = draw_of(rng, home, sizes);
    settle(rng, &mut case);
    case.functions = Functions::default();
    case.settings.alignment = case.settings.alignment.or(Some(Alignment::TopLeft));
    let (rows, keys) = case.longest();
    let both = draw(rng, case.batch(), keys.max(rows), 2);
    bits_of_mask(rng, recorder, &case, home, &both);
}

/// What a call with a mask gives, if it is one of the call's.
pub(super) fn bits_of_mask(rng: &mut Rng, recorder: &mut Recorder, case: &Case, home: Home, both: &Both) {
    recorder.describe(case, home);
    recorder.say(&both.what);
    if !both.fits {
        return recorder.say("refused");
    }
    let (stage, wanted) = (Stage::new(rng, case, home), Wanted::draw(rng));
    recorder.say(wanted);
    let stock = &*both.stock;
    recorder.each(rng, |rng, exec| {
        let mut outs = Outs::blank(rng, case, wanted);
        let problem = case.attention().problem(stage.inputs(), outs.outputs()).expect("a good call");
        let (plan, mods) = (Plan::new(&problem, exec), Mods::new().mask(stock));
        problem.run_with(&plan, &mut Workspace::new(), Run::new().mods(&mods)).expect("a mask that fits");
        outs.take("bits").all()
    });
}

/// A call with a mask: the bits of a mask that is a tensor, and those are the oracle's.
pub(super) fn check_mask(rng: &mut Rng, case: &Case, home: Home, both: &Both) {
    let what = format!("{}, {home:?}: {}", both.what, case.describe());
    let (wanted, exec) = (Wanted::draw(rng), Exec::serial());
    let (stage, mut outs) = (Stage::new(rng, case, home), Outs::blank(rng, case, wanted));
    let problem = case.attention().problem(stage.inputs(), outs.outputs()).expect("a good call");
    let plan = Plan::new(&problem, exec);
    let done = problem.run_with(&plan, &mut Workspace::new(), Run::new().mods(&Mods::new().mask(&*both.stock)));
    assert_eq!(done.is_ok(), both.fits, "{what}: {done:?}");
    if let Err(error) = done {
        assert!(matches!(error, Error::Mask(..)) && outs.is_blank(), "{what}: {error}");
        return;
    }
    let tensor = with_tensor(case, both);
    let expected = Stage::new(rng, &tensor, home).run(&what, &mut Outs::blank(rng, &tensor, wanted), exec);
    if !home.is_integers() {
        expected.check(&what, &Oracle::of(&tensor).answer());
    }
    outs.take(&what).same(&what, &expected);
    (0..40).for_each(|_| classes(rng, both, case, &what));
}

/// The case with a tensor in place of the mask. It may have one already: both hide.
fn with_tensor(case: &Case, both: &Both) -> Case {
    let (rows, keys) = case.longest();
    let keeps = |at: [usize; 4]| {
        case.mask
            .as_ref()
            .is_none_or(|(x, polarity)| x.get(at).is_some_and(|x| (x != 0.0) == (*polarity == Polarity::NonzeroKeeps)))
    };
    let plain = |[batch, head, row, key]: [usize; 4]| {
        let position = case.offset(batch).saturating_add_unsigned(row);
        (both.plain)(Position { batch, head, row, key, position, distance: position.saturating_sub_unsigned(key) })
    };
    let shape = [case.batch(), case.heads(), rows, keys];
    let of = Array::from_fn(shape, |at| if keeps(at) && plain(at) { 1.0 } else { 0.0 });
    Case { mask: Some((Entries { of, cover: Cover::All }, Polarity::NonzeroKeeps)), ..case.clone() }
}

/// What the mask says of pairs and of blocks is what its definition says.
fn classes(rng: &mut Rng, both: &Both, case: &Case, what: &str) {
    if case.batch() == 0 || case.heads() == 0 {
        return;
    }
    let (batch, head) = (rng.below(case.batch()), rng.below(case.heads()));
    let (rows, keys) = (case.rows(batch), case.keys(batch));
    if rows == 0 || keys == 0 {
        return;
    }
    let (row, key) = (rng.below(rows), rng.below(keys));
    let (end, most) = (row + 1 + rng.below((rows - row).min(9)), rng.pick(&[16, 40]));
    let keys = key..(key + 1 + rng.below((keys - key).min(most))).min((key / 256 + 1) * 256);
    let position = case.offset(batch).saturating_add_unsigned(row);
    let block = BlockPosition { batch, head, rows: row..end, keys, position };
    let plain: BlockClass = block.pairs().map(&both.plain).collect();
    let class = both.stock.class(block.clone());
    assert!(class == plain || class == BlockClass::Mixed, "{what}: {block:?} is {class:?}, and should be {plain:?}");
    for at in block.pairs() {
        assert_eq!(both.stock.keep(at), (both.plain)(at), "{what}: {at:?}");
    }
}

/// A random mask over some keys, combined of others, to a largest depth.
fn draw(rng: &mut Rng, batch: usize, keys: usize, depth: usize) -> Both {
    if depth == 0 || rng.one_in(2) {
        return if rng.one_in(4) { per_sequence(rng, batch, keys) } else { leaf(rng, keys) };
    }
    let Both { stock: a, plain: x, what: first, fits } = draw(rng, batch, keys, depth - 1);
    if rng.one_in(3) {
        return Both {
            stock: Box::new(a.not()),
            plain: Box::new(move |at| !x(at)),
            what: format!("not {first}"),
            fits,
        };
    }
    let Both { stock: b, plain: y, what: second, fits: other } = draw(rng, batch, keys, depth - 1);
    let fits = fits && other;
    if rng.one_in(2) {
        let plain = Box::new(move |at| x(at) && y(at));
        return Both { stock: Box::new(a.and(b)), plain, what: format!("({first} and {second})"), fits };
    }
    let plain = Box::new(move |at| x(at) || y(at));
    Both { stock: Box::new(a.or(b)), plain, what: format!("({first} or {second})"), fits }
}

fn leaf(rng: &mut Rng, keys: usize) -> Both {
    match rng.below(3) {
        0 => {
            let prefix = rng.pick(&[0, 1, rng.clone().below(keys + 2), usize::MAX]);
            let plain = move |at: Position| at.key < prefix || at.key as i128 <= at.position as i128;
            let what = format!("prefix of {prefix}");
            Both { stock: Box::new(PrefixLm::new(prefix)), plain: Box::new(plain), what, fits: true }
        }
        1 => {
            let mut ends: Vec<usize> = (0..rng.below(6)).map(|_| rng.below(keys + 2)).collect();
            ends.sort_unstable();
            let what = format!("documents to {ends:?}");
            let stock = Box::new(Documents::by_ends(&ends).expect("they rise"));
            let document = move |key: usize| ends.iter().filter(|&&end| end <= key).count();
            let plain = move |at: Position| at.position >= 0 && document(at.position as usize) == document(at.key);
            Both { stock, plain: Box::new(plain), what, fits: true }
        }
        _ => {
            let (few, stretch) = (1 + rng.below(4), rng.pick(&[1, 3, 40]));
            let mut ids: Vec<usize> = Vec::new();
            while ids.len() < keys {
                let id = rng.below(few);
                ids.extend((0..1 + rng.below(stretch)).map(|_| id));
            }
            let stock = Box::new(Documents::by_ids(&ids));
            let document = move |key: usize| ids.get(key).copied();
            let plain = move |at: Position| at.position >= 0 && document(at.position as usize) == document(at.key);
            let what = format!("{few} documents in stretches of {stretch}");
            Both { stock, plain: Box::new(plain), what, fits: true }
        }
    }
}

fn per_sequence(rng: &mut Rng, batch: usize, keys: usize) -> Both {
    // One more or less than there are sequences, at times.
    let masks = rng.pick(&[batch, batch, batch, batch, batch + 1, batch.saturating_sub(1)]);
    let all: Vec<Both> = (0..masks).map(|_| leaf(rng, keys)).collect();
    let what = format!("each of {:?}", all.iter().map(|one| &*one.what).collect::<Vec<_>>());
    let (stock, plain): (Vec<_>, Vec<_>) = all.into_iter().map(|one| (one.stock, one.plain)).unzip();
    let plain = move |at: Position| plain[at.batch](at);
    Both { stock: Box::new(PerSequence::new(stock)), plain: Box::new(plain), what, fits: masks == batch }
}
