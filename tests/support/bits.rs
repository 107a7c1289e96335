//! Hashes of what calls write, and files that say what they were.
#![allow(dead_code, reason = "compiled into each test of bits and into the fuzzer; none uses all of it")]

/// FNV-1a of 64 bits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hash(u64);

impl Hash {
    pub(crate) const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    pub(crate) fn number(&mut self, n: u64) {
        self.bytes(&n.to_le_bytes());
    }

    /// Numbers with their count, bit for bit.
    pub(crate) fn floats(&mut self, floats: &[f32]) {
        self.number(floats.len() as u64);
        floats.iter().for_each(|x| self.bytes(&x.to_bits().to_le_bytes()));
    }

    pub(crate) const fn value(self) -> u64 {
        self.0
    }
}
