#![doc = include_str!("../README.md")]
// But for two casts in elements.rs.
#![deny(unsafe_code)]

mod arguments;
mod call;
mod elements;
mod errors;
mod leading;
mod outputs;
mod settings;

/// Functions of the module `sdpa._sdpa`, behind those of `python/sdpa/__init__.py`, which have the names and defaults of all
/// arguments.
#[pyo3::pymodule(gil_used = true)]
mod _sdpa {
    use crate::arguments::Arguments;
    use crate::call::Call;
    use pyo3::prelude::*;
    use pyo3::types::PyDict;
    use sdpa::Isa;

    /// Version of the package.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    /// Computes a call of these arguments, by name. Returns the output, or output and log-sum-exp.
    #[pyfunction]
    fn attention<'py>(arguments: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyAny>> {
        let arguments = Arguments::new(arguments);
        let call = Call::new(&arguments)?;
        let outputs = call.outputs(&arguments)?;
        call.run(outputs)
    }

    /// Returns the plan of the same call, and the reasons for it, in words.
    #[pyfunction]
    fn explain(arguments: &Bound<'_, PyDict>) -> PyResult<String> {
        let arguments = Arguments::new(arguments);
        let call = Call::new(&arguments)?;
        let outputs = call.outputs(&arguments)?;
        call.explain(outputs)
    }

    /// Returns the names of the instruction sets of this machine, narrowest first.
    #[pyfunction]
    fn instruction_sets() -> Vec<&'static str> {
        Isa::available().map(Isa::name).collect()
    }

    /// Returns the slopes of the ALiBi paper, one for each head.
    #[pyfunction]
    fn alibi_slopes(heads: usize) -> Vec<f32> {
        sdpa::alibi_slopes(heads)
    }
}
