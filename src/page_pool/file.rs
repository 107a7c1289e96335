//! Sequences of a pool as safetensors files.

use crate::cache::file::{Description, FilePart, FileTarget, NO_FORMAT};
use crate::error::{Error, same};
use crate::page_pool::PagePool;
use crate::tensor_file::{TensorFile, wrong};
use sdpa_kernels::{BlockTable, NewTokens, TokenPart};

/// Returns the page and row of token `[sequence, head, token]`, as `[page, head, row]`.
fn place(table: &BlockTable<'_>, page_size: usize, [sequence, head, token]: [usize; 3]) -> [usize; 3] {
    let entry = sequence * (table.entries.len() / table.lens.len()) + token / page_size;
    [table.entries[entry] as usize, head, token % page_size]
}

impl PagePool {
    /// Returns the sequences of a table as the bytes of a safetensors file, the same as that of a cache of these sequences:
    /// [`KvCache::export`](crate::KvCache::export). [`Self::import`] and [`KvCache::import`](crate::KvCache::import) read it. Takes
    /// the feature `safetensors`.
    ///
    /// ```
    /// use sdpa::{BlockTable, CacheFormat, Dtype, KvCache, KvShape, PagePool, View};
    /// let shape = KvShape { kv_heads: 1, head_dim: 2, value_dim: 2 };
    /// let mut pool = PagePool::new(8, 16, shape, CacheFormat::Elements(Dtype::Bf16))?;
    /// let rows = [0.5; 20 * 2];
    /// let rows = View::bhld(&rows, [1, 1, 20, 2])?;
    /// pool.append(BlockTable { entries: &[4, 7], lens: &[20] }, rows, rows)?;
    /// let bytes = pool.export(BlockTable { entries: &[4, 7], lens: &[20] })?;
    /// pool.import(BlockTable { entries: &[0, 1], lens: &[20] }, &bytes)?; // later, in other pages
    /// assert_eq!(KvCache::import(&bytes)?.lens(), [20]);
    /// # Ok::<(), sdpa::Error>(())
    /// ```
    ///
    /// Exact tokens of a sequence that begins with a page which was written as another's later one are those of its integers.
    ///
    /// # Errors
    /// [`Error::Pages`] if the table does not fit the pool; otherwise as for a cache.
    pub fn export(&self, table: BlockTable<'_>) -> Result<Vec<u8>, Error> {
        self.pages(table)?;
        let description = Description::of_lens(self.shape(), self.format(), table.lens);
        let description = description.ok_or(Error::File { what: "export", why: NO_FORMAT.into() })?;
        let elements = TokenPart::ALL.map(|part| self.pool.token_elements(part));
        let read = |part, at, to: &mut [u8]| self.pool.read_token(part, place(&table, self.page_size(), at), to);
        let (prefix, format, read) = (String::new(), self.format(), Box::new(read));
        FilePart { prefix, description, format, elements, read }.alone()
    }

    /// Writes the sequences of a file to the pages of a table. It has the same number of sequences, of the same lengths; removed
    /// ones have length 0. The file is that of a pool, or of a cache that is neither latent nor sliding, of the pool's sizes and
    /// format. Takes the feature `safetensors`.
    ///
    /// # Errors
    /// [`Error::Pages`] if the table does not fit the pool; [`Error::Mismatch`] for sizes, [`Error::Entry`] for lengths that are
    /// not those of the file; [`Error::File`], with the reason, for anything but such a file. The pool is then unchanged.
    pub fn import(&mut self, table: BlockTable<'_>, bytes: &[u8]) -> Result<(), Error> {
        self.pages(table)?;
        let file = TensorFile::read(bytes)?;
        let description = file.description()?;
        self.check_file(&file, &description)?;
        same("table", "number of sequences", table.lens.len(), description.sequences.len(), "the file")?;
        let lens = description.sequences.iter().map(|contents| contents.map_or(0, |contents| contents.len));
        let mut pairs = table.lens.iter().zip(lens).enumerate();
        if let Some((index, (&got, limit))) = pairs.find(|(_, (got, len))| *got != len) {
            let (bound, of) = (sdpa_kernels::Bound::Exactly, "the length in the file");
            return Err(Error::Entry { argument: "lengths of the block table", index, got, bound, limit, of });
        }
        let each = |part| self.pool.token_elements(part);
        let sequences = (0..table.lens.len()).map(|sequence| file.sequence("", &description, sequence, each));
        let sequences = sequences.collect::<Result<Vec<_>, _>>()?;
        let size = self.page_size();
        let new = table.lens.iter().enumerate().map(|(sequence, &len)| NewTokens { sequence, b: 0, rows: 0..len });
        if !self.pool.reserve_first(table, new) {
            return Err(Error::Memory { what: "page pool", bytes: self.bytes() });
        }
        for (sequence, tensors) in sequences.iter().enumerate() {
            tensors.for_each_token(|part, [head, token], bytes| {
                self.pool.write_token(part, place(&table, size, [sequence, head, token]), bytes);
            });
        }
        Ok(())
    }

    /// Refuses a file of other sizes or another format.
    fn check_file(&self, file: &TensorFile<'_>, description: &Description) -> Result<(), Error> {
        let evicted = description.sequences.iter().flatten().any(|contents| contents.evicted.is_some());
        if description.latent || description.window.is_some() || evicted {
            return Err(wrong("the cache in the file is latent or sliding, which the sequences of a pool are not"));
        }
        let own = Description::of_lens(self.shape(), self.format(), &[]).ok_or_else(|| wrong(NO_FORMAT))?;
        file.check_form("", description, &FileTarget { name: "the pool", format: self.format(), description: own })
    }
}
