//! Memory that a call leaves to the next one: of parcels, and of the states of rows.

use crate::error::Error;
use crate::layout::PARCEL;
use sdpa::Workspace;

/// Memory that is used again: what is new costs the time of its first touch.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) wide: Buffers<f32>,
    pub(crate) short: Buffers<u16>,
    pub(crate) states: Vec<Workspace>,
}

/// Buffers for parcels.
#[derive(Debug)]
pub(crate) struct Buffers<T> {
    free: Vec<Vec<T>>,
    /// Elements of those that are in use.
    lent: usize,
}

impl<T> Default for Buffers<T> {
    fn default() -> Self {
        Self { free: Vec::new(), lent: 0 }
    }
}

impl<T> Buffers<T> {
    /// Elements that are kept for later beside those in use: two parcels together.
    const MOST: usize = 2 * PARCEL / size_of::<T>();

    /// Returns memory for `len` elements, which may hold others.
    pub(crate) fn take(&mut self, len: usize) -> Result<Vec<T>, Error> {
        let fits = self.free.iter().enumerate().filter(|(_, buffer)| (len..=2 * len).contains(&buffer.capacity()));
        let best = fits.min_by_key(|(_, buffer)| buffer.capacity()).map(|(at, _)| at);
        let buffer = match best {
            Some(at) => self.free.swap_remove(at),
            None => {
                self.shrink_to(Self::MOST.saturating_sub(self.lent + len));
                room(len)?
            }
        };
        self.lent += buffer.capacity();
        Ok(buffer)
    }

    /// Takes memory back.
    pub(crate) fn give(&mut self, buffer: Vec<T>) {
        self.lent = self.lent.saturating_sub(buffer.capacity());
        self.free.push(buffer);
        self.shrink_to(Self::MOST.saturating_sub(self.lent));
    }

    /// Frees buffers until those that are left have at most `most` elements.
    fn shrink_to(&mut self, most: usize) {
        let mut held = 0;
        // Those that came last are still in the processor's caches.
        let keep = self.free.iter().rev().take_while(|buffer| {
            held += buffer.capacity();
            held <= most
        });
        let keep = keep.count();
        self.free.drain(..self.free.len() - keep);
    }
}

/// Returns new memory for `len` elements.
fn room<T>(len: usize) -> Result<Vec<T>, Error> {
    let mut memory = Vec::new();
    let refused = |_| sdpa::Error::Memory { what: "a parcel of keys", bytes: len.saturating_mul(size_of::<T>()) };
    memory.try_reserve_exact(len).map_err(refused)?;
    Ok(memory)
}

/// Returns `len` zeros.
pub(crate) fn zeros<T: Copy + Default>(len: usize) -> Result<Vec<T>, Error> {
    let mut memory = room(len)?;
    memory.resize(len, T::default());
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_again_and_never_hold_more_than_two_parcels_beside_those_in_use() {
        let mut buffers = Buffers::<f32>::default();
        let held = |buffers: &Buffers<f32>| buffers.free.iter().map(Vec::capacity).sum::<usize>();
        let most = Buffers::<f32>::MOST;
        let first = buffers.take(1000).unwrap();
        let at = first.as_ptr();
        buffers.give(first);
        // Much too large for this, so not used.
        let small = buffers.take(10).unwrap();
        assert_ne!(small.as_ptr(), at);
        let again = buffers.take(900).unwrap();
        assert_eq!(again.as_ptr(), at);
        buffers.give(again);
        buffers.give(small);
        for len in [most / 4, most / 3, most / 2, most, 2 * most] {
            let several: Vec<_> = (0..4).map(|_| buffers.take(len).unwrap()).collect();
            assert!(held(&buffers) + buffers.lent <= most.max(buffers.lent));
            several.into_iter().for_each(|buffer| buffers.give(buffer));
            assert!(held(&buffers) + buffers.lent <= most.max(buffers.lent));
        }
    }
}
