//! A sequence of a cache of states as plain states tell it.

use crate::linear_attention_support::Case;
use crate::support::{Tensor, UNWRITTEN, indices};
use sdpa::Exec;
use sdpa_layers::{LinearAttention, LinearState};

#[derive(Debug, Clone)]
pub(super) struct Plain {
    /// After each number of tokens, from 0 on; none inside the chunked part of a call.
    states: Vec<Option<LinearState>>,
    /// Each a call of one token.
    tokens: Vec<Case>,
    /// First of the lengths up to the current one that can be gone back to, one by one, and the one before the last call.
    promised: [usize; 2],
}

impl Plain {
    pub(super) fn new(initial: &LinearState) -> Self {
        Self { states: vec![Some(initial.clone())], tokens: Vec::new(), promised: [0; 2] }
    }

    pub(super) fn len(&self) -> usize {
        self.states.len() - 1
    }

    pub(super) fn state(&self, len: usize) -> Option<&LinearState> {
        self.states[len].as_ref()
    }

    pub(super) fn is_promised(&self, len: usize) -> bool {
        len == 0 || len <= self.len() && (len >= self.promised[0] || len == self.promised[1])
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.states.truncate(len + 1);
        self.tokens.truncate(len);
        self.promised[0] = self.promised[0].min(len);
        self.promised[1] = if self.promised[1] > len { 0 } else { self.promised[1] };
    }

    /// Takes the tokens of a call, in calls of plain states: the first ones together, the last ones one by one.
    pub(super) fn decode(&mut self, tokens: &Case, layer: LinearAttention, room: usize, exec: Exec) -> Tensor {
        let before = self.len();
        let len = tokens.k.shape[2];
        let together = if len > room + 1 { len - room } else { 0 };
        let mut out = Tensor::filled(tokens.out_shape(), f32::from_bits(UNWRITTEN));
        let mut done = 0;
        while done < len {
            let end = if done < together { together } else { done + 1 };
            let mut piece = tokens.map(|tensor| tensor.rows(done..end));
            piece.state = self.state(self.len()).expect("a current state").clone();
            let got = piece.run(layer, exec);
            for [_, h, t, _] in indices([1, out.shape[1], end - done, 1]) {
                out.copy_row([0, h, done + t], &got.out, [0, h, t]);
            }
            self.states.extend((done + 1..end).map(|_| None));
            self.states.push(Some(got.state));
            done = end;
        }
        self.tokens.extend((0..len).map(|t| tokens.map(|tensor| tensor.rows(t..t + 1))));
        if len > 0 {
            let first = self.len().saturating_sub(room);
            self.promised = [if together > 0 { first } else { first.max(self.promised[0]) }, before];
        }
        out
    }

    /// Returns the state after all tokens by one call over them, from the initial state.
    pub(super) fn whole(&self, layer: LinearAttention, exec: Exec) -> LinearState {
        let initial = self.state(0).expect("it is never forgotten");
        match join(&self.tokens) {
            Some(all) => Case { state: initial.clone(), ..all }.run(layer, exec).state,
            None => initial.clone(),
        }
    }
}

/// Returns the call of all these tokens, each a call of one, if there are some.
pub(super) fn join(tokens: &[Case]) -> Option<Case> {
    let join = |of: &dyn Fn(&Case) -> Option<&Tensor>| {
        let [_, h, _, d] = of(tokens.first()?)?.shape;
        let mut all = Tensor::filled([1, h, tokens.len(), d], 0.0);
        for (t, token) in tokens.iter().enumerate() {
            (0..h).for_each(|h| all.copy_row([0, h, t], of(token).expect("of one rule"), [0, h, 0]));
        }
        Some(all)
    };
    Some(Case {
        q: join(&|token| Some(&token.q))?,
        k: join(&|token| Some(&token.k))?,
        v: join(&|token| Some(&token.v))?,
        log_decay: join(&|token| token.log_decay.as_ref()),
        beta: join(&|token| token.beta.as_ref()),
        state: tokens[0].state.clone(),
        lens: None,
    })
}

/// Bits of a state.
pub(super) fn bits(state: &LinearState) -> Vec<u32> {
    state.as_slice().iter().map(|x| x.to_bits()).collect()
}
