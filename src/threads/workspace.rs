//! Memory that calls leave to the next ones.

use crate::threads::workers;
use sdpa_kernels::{BackwardMemory, BackwardScratch, Chooser, Partials, Scratch, SelectedKeys};
use std::sync::Mutex;

/// Reusable memory of calls, forward and backward, and of states ([`AttnState::finish`](crate::AttnState::finish)). It grows to
/// what the largest of them takes and is kept: memory that is new costs the time of its first touch.
///
/// A second run of the same plan with the same workspace allocates nothing.
///
/// ```
/// use sdpa::{Attention, Exec, Inputs, Outputs, Plan, View, ViewMut, Workspace};
/// let (x, mut out, mut workspace, mut plan) = ([0.5; 3 * 4], [0.0; 3 * 4], Workspace::new(), None);
/// for _ in 0..10 {
///     let x = View::bhld(&x, [1, 1, 3, 4])?;
///     let outputs = Outputs::new(ViewMut::bhld(&mut out, [1, 1, 3, 4])?);
///     let problem = Attention::new().problem(Inputs::new(x, x, x), outputs)?;
///     let plan = *plan.get_or_insert_with(|| Plan::new(&problem, Exec::serial())); // made once, kept
///     problem.run(&plan, &mut workspace); // allocates the first time only
/// }
/// assert!(workspace.bytes() > 0);
/// # Ok::<(), sdpa::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Workspace {
    /// One scratch for each worker of a forward call. Locked while in use, so that an executor that calls a worker twice at once makes one of the two
    /// do nothing.
    pub(crate) forward: Vec<Mutex<Scratch>>,
    /// Partial results of key blocks, where these are divided among workers.
    pub(crate) partials: Partials,
    /// One scratch for each worker of a backward call.
    pub(crate) backward: Vec<Mutex<BackwardScratch>>,
    /// For each query row its gradient in `f32`, and sums of the rows.
    pub(crate) gradients: BackwardMemory,
    /// Maxima, sums and outputs of a state that is finished.
    pub(crate) state: [Vec<f32>; 3],
    /// Memory of calls that choose keys.
    pub(crate) choice: ChoiceMemory,
}

/// Memory of calls that choose keys.
#[derive(Debug, Default)]
pub(crate) struct ChoiceMemory {
    /// Number of query rows of each sequence.
    pub(crate) q_lens: Vec<usize>,
    /// Groups of rows that are computed together: a selection without lists.
    pub(crate) groups: SelectedKeys,
    /// Scores of the lists that are chosen next, and the numbers of the keys that they choose.
    pub(crate) scores: Vec<f32>,
    pub(crate) chosen: Vec<u32>,
    /// Memory of each worker.
    pub(crate) workers: Vec<Mutex<Chooser>>,
}

impl ChoiceMemory {
    const fn new() -> Self {
        Self {
            q_lens: Vec::new(),
            groups: SelectedKeys::new(),
            scores: Vec::new(),
            chosen: Vec::new(),
            workers: Vec::new(),
        }
    }

    fn bytes(&self) -> usize {
        let Self { q_lens, groups, scores, chosen, workers } = self;
        let words = (scores.capacity() + chosen.capacity()) * size_of::<u32>();
        words + q_lens.capacity() * size_of::<usize>() + groups.bytes() + workers::bytes(workers, Chooser::bytes)
    }
}

impl Workspace {
    /// Creates an empty workspace; the first run fills it.
    pub const fn new() -> Self {
        Self {
            forward: Vec::new(),
            partials: Partials::new(),
            backward: Vec::new(),
            gradients: BackwardMemory::new(),
            state: [const { Vec::new() }; 3],
            choice: ChoiceMemory::new(),
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let state: usize = self.state.iter().map(|part| part.capacity() * size_of::<f32>()).sum();
        let workers =
            workers::bytes(&self.forward, Scratch::bytes) + workers::bytes(&self.backward, BackwardScratch::bytes);
        workers + self.partials.bytes() + self.gradients.bytes() + state + self.choice.bytes()
    }
}
