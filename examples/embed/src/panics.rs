//! Panics of a library that should have refused.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Calls of [`caught`] under way: until they are done, panics of any thread say nothing on standard error.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);
static HOOK: Once = Once::new();

/// What `work` returns, or the words that it panics with. What it was working on is not to be used after a panic.
pub(crate) fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    HOOK.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if UNDER_WAY.load(Ordering::SeqCst) == 0 {
                usual(panic);
            }
        }));
    });
    UNDER_WAY.fetch_add(1, Ordering::SeqCst);
    let done = panic::catch_unwind(AssertUnwindSafe(work));
    UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
    done.map_err(|words| match (words.downcast_ref::<&str>(), words.downcast_ref::<String>()) {
        (Some(words), _) => (*words).to_owned(),
        (_, Some(words)) => words.clone(),
        _ => "it does not say why".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_kept() {
        assert_eq!(caught(|| 7), Ok(7));
        assert_eq!(caught(|| panic!("why")), Err::<(), _>("why".to_owned()));
        let seven = 7;
        assert_eq!(caught(|| panic!("{seven}")), Err::<(), _>("7".to_owned()));
        assert_eq!(caught(|| panic::panic_any(7)), Err::<(), _>("it does not say why".to_owned()));
    }
}
