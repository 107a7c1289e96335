//! What layers compute with.

use crate::plan::Exec;
use crate::schedule::{Workspace, current_threads};

/// What layers compute with: threads, an instruction set, and memory that is used again.
///
/// Keep one and pass it to every call: buffers grow to what the largest call needs and stay, so that a warm call on one
/// thread allocates nothing.
#[derive(Debug, Default)]
pub struct Compute {
    exec: Exec,
    workspace: Workspace,
    buffers: Vec<Vec<f32>>,
    lengths: Vec<usize>,
}

impl Compute {
    /// No memory yet; the first call takes it.
    pub fn new(exec: Exec) -> Self {
        Self { exec, workspace: Workspace::new(), buffers: Vec::new(), lengths: Vec::new() }
    }

    /// Threads and instruction set.
    pub fn exec(&self) -> Exec {
        self.exec
    }

    /// Threads that a call made here can have.
    pub(crate) fn threads(&self) -> usize {
        // One thread needs no pool: asking would start it.
        if self.exec.threads > 1 { self.exec.threads.min(current_threads()) } else { 1 }
    }

    /// Scratch of attention calls.
    pub(crate) fn workspace(&mut self) -> &mut Workspace {
        &mut self.workspace
    }

    /// A buffer of this length; what it holds is left over from earlier calls. Give it back with [`Self::recycle`].
    pub(crate) fn buffer(&mut self, len: usize) -> Buffer {
        // The smallest that is large enough, else the largest there is: sizes settle after one call.
        let fits = |floats: &Vec<f32>| (floats.len() < len, floats.len().abs_diff(len));
        let best = (0..self.buffers.len()).min_by_key(|&i| fits(&self.buffers[i]));
        let mut floats = best.map_or_else(Vec::new, |i| self.buffers.swap_remove(i));
        if floats.len() < len {
            // Not `resize`: the old contents are worth nothing. Fresh zeros come from the system untouched.
            floats = vec![0.0; len];
        }
        Buffer { floats, len }
    }

    /// Takes back a buffer that [`Self::buffer`] gave.
    pub(crate) fn recycle(&mut self, buffer: Buffer) {
        self.buffers.push(buffer.floats);
    }

    /// A list for lengths, empty. Give it back with [`Self::recycle_lengths`].
    pub(crate) fn lengths(&mut self) -> Vec<usize> {
        let mut lengths = core::mem::take(&mut self.lengths);
        lengths.clear();
        lengths
    }

    /// Takes back the list that [`Self::lengths`] gave.
    pub(crate) fn recycle_lengths(&mut self, lengths: Vec<usize>) {
        self.lengths = lengths;
    }
}

/// Memory lent by a [`Compute`].
#[derive(Debug)]
pub(crate) struct Buffer {
    /// As long as it ever was, so that nothing is cleared when lengths come and go.
    floats: Vec<f32>,
    len: usize,
}

impl core::ops::Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.floats[..self.len]
    }
}

impl core::ops::DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.floats[..self.len]
    }
}
