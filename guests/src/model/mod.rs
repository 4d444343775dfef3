//! What the guests do to their memory, as rules that the checker can replay.
//!
//! RAM is divided into *shares*, one per *worker* (a thread of the process guest, a vCPU of tide). A
//! worker takes *steps* 1, 2, 3 … Step `s` writes one page of the share: [`Pattern::page`] says which,
//! from `s` alone. Into it go a header word (`s` itself, first) and words that are derived from the
//! step, the page's identity and the word's place ([`words::word`]), in ascending order, the last one in
//! the last 8 bytes of the page. Only then the worker counts the step. So when the guest stands still, a
//! worker's counter S and its seed tell which step wrote each page last, hence every byte of it; only
//! the page of step S+1 may be half new, a prefix of new words before a suffix of old ones.
//!
//! Pattern and working set may change while the guest runs. A worker notes the change, with the first
//! step that it holds for, in its [`History`] before it takes that step.
//!
//! What no step wrote must hold its [`Fill`].
#![forbid(unsafe_code)]

pub mod fill;
pub mod history;
pub mod pattern;
pub mod share;
pub mod words;

pub use fill::Fill;
pub use history::{Epoch, History};
pub use pattern::Pattern;
pub use share::{Segment, Share};
pub use words::{PageId, PageWords, WORDS_PER_PAGE, WordPlan};
