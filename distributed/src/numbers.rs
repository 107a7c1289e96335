//! Lists of numbers, as ranks send them to each other.

/// List that grows.
#[derive(Debug, Default)]
pub(crate) struct Numbers(pub(crate) Vec<u64>);

impl Numbers {
    pub(crate) fn numbers<const N: usize>(&mut self, numbers: [usize; N]) {
        self.0.extend(numbers.map(|number| number as u64));
    }

    /// Appends the number of pairs, then the pairs.
    pub(crate) fn pairs(&mut self, pairs: impl ExactSizeIterator<Item = [usize; 2]>) {
        self.numbers([pairs.len()]);
        pairs.for_each(|pair| self.numbers(pair));
    }

    /// Appends the number of bytes, then the bytes, eight to a number.
    pub(crate) fn text(&mut self, text: &str) {
        self.numbers([text.len()]);
        for bytes in text.as_bytes().chunks(8) {
            let mut eight = [0; 8];
            eight[..bytes.len()].copy_from_slice(bytes);
            self.0.push(u64::from_le_bytes(eight));
        }
    }
}

/// Rest to read of a list that [`Numbers`] made. Its methods return `None` if it is not such a list.
#[derive(Debug)]
pub(crate) struct Reader<'n>(pub(crate) &'n [u64]);

impl Reader<'_> {
    pub(crate) fn number(&mut self) -> Option<usize> {
        let (&number, rest) = self.0.split_first()?;
        self.0 = rest;
        usize::try_from(number).ok()
    }

    pub(crate) fn numbers<const N: usize>(&mut self) -> Option<[usize; N]> {
        let mut numbers = [0; N];
        for number in &mut numbers {
            *number = self.number()?;
        }
        Some(numbers)
    }

    pub(crate) fn pairs(&mut self) -> Option<Vec<[usize; 2]>> {
        (0..self.number()?).map(|_| self.numbers()).collect()
    }

    pub(crate) fn text(&mut self) -> Option<String> {
        let len = self.number()?;
        let (text, rest) = self.0.split_at_checked(len.div_ceil(8))?;
        self.0 = rest;
        let bytes = text.iter().flat_map(|eight| eight.to_le_bytes()).take(len);
        String::from_utf8(bytes.collect()).ok()
    }
}
