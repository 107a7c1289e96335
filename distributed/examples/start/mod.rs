//! Start and end of the examples: options from the command line, and ranks that begin and end.

#![allow(dead_code, reason = "not every example has ranks, or options of each kind")]

use mpi::topology::SimpleCommunicator;
use mpi::traits::*;
use std::error::Error;
use std::str::FromStr;

/// Result of what may fail in any way.
pub(crate) type Done<T = ()> = Result<T, Box<dyn Error>>;

/// Options of an example, each with its default.
pub(crate) trait Options: Default {
    /// Text that `--help` prints.
    const HELP: &str;
    /// Takes an option, and its value from the words that follow. Returns false if it does not know the option.
    fn take(&mut self, option: &str, words: &mut Words) -> Done<bool>;
}

/// Words of the command line, and the option that was read last.
pub(crate) struct Words {
    rest: std::iter::Skip<std::env::Args>,
    option: String,
}

impl Words {
    /// Returns the value of the option.
    pub(crate) fn value(&mut self) -> Done<String> {
        Ok(self.rest.next().ok_or(format!("{}: a value is missing", self.option))?)
    }

    /// Returns the value of the option, read as what it is.
    pub(crate) fn parsed<T: FromStr<Err: Error + 'static>>(&mut self) -> Done<T> {
        let value = self.value()?;
        value.parse().map_err(|error| format!("{} {value}: {error}", self.option).into())
    }

    /// Returns the value of the option, sizes as in an example.
    pub(crate) fn sizes<const N: usize>(&mut self, example: &str) -> Done<[usize; N]> {
        let sizes: Vec<usize> = self.value()?.split('x').map(str::parse).collect::<Result<_, _>>()?;
        Ok(sizes.try_into().map_err(|_| format!("{}: {N} sizes, as {example}", self.option))?)
    }

    /// Returns what the value of the option names.
    pub(crate) fn one_of<T: Copy>(&mut self, named: &[(&str, T)]) -> Done<T> {
        let value = self.value()?;
        let found = named.iter().find(|(name, _)| *name == value);
        let names = || named.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        Ok(found.ok_or_else(|| format!("{} {value}: but must be one of {}", self.option, names()))?.1)
    }
}

/// Reads the command line; `None` if it asks for help, which is printed.
pub(crate) fn options<O: Options>() -> Done<Option<O>> {
    let mut words = Words { rest: std::env::args().skip(1), option: String::new() };
    let mut options = O::default();
    while let Some(option) = words.rest.next() {
        if option == "--help" {
            println!("{}", O::HELP);
            return Ok(None);
        }
        words.option.clone_from(&option);
        if !options.take(&option, &mut words)? {
            return Err(format!("{option}: not known; --help lists what is").into());
        }
    }
    Ok(Some(options))
}

/// Reads the command line, and runs an example on all ranks.
pub(crate) fn on_ranks<O: Options>(run: impl FnOnce(&SimpleCommunicator, &O) -> Done) -> Done {
    let Some(options) = options()? else { return Ok(()) };
    let universe = mpi::initialize().ok_or("MPI has begun already")?;
    let world = universe.world();
    // Without the end of MPI, which would wait for ranks that are gone.
    run(&world, &options).map_err(|error| {
        eprintln!("rank {}: {error}", world.rank());
        std::process::exit(1)
    })
}
