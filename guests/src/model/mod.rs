//! The rules by which the guests change their memory, and which the checker replays.
//!
//! RAM is divided into *shares*, one per *worker* (a thread of the process guest, a vCPU of tide). A worker
//! takes *steps* 1, 2, 3 … Step `s` writes one page of the share: [`Pattern::page`] derives the page from
//! `s` alone. The step first writes a header word (`s` itself). Then it writes words that are derived from
//! the step, the page's identity and the word's position ([`words::word`]). It writes them in ascending
//! order, and the last word is in the last 8 bytes of the page. The worker counts the step only after its
//! last word.
//!
//! So when the guest is paused, a worker's counter S and its seed determine which step wrote each page
//! last. That determines every byte of the page. Only the page of step S+1 may be partly new: a prefix of
//! new words before a suffix of old ones.
//!
//! Pattern and working set may change while the guest runs. A worker records the change, with its first
//! step, in its [`History`] before it takes that step.
//!
//! A guest may also have steps that zero pages ([`Act`]), by stores or by giving memory back to the host.
//! Seed and step also determine which steps these are. A page that was zeroed reads as zero until another
//! step writes words over the zeros.
//!
//! A page that no step touched must contain its [`Fill`].
#![forbid(unsafe_code)]

pub mod act;
pub mod fill;
pub mod history;
pub mod pattern;
pub mod share;
pub mod words;

pub use act::{Act, Acts};
pub use fill::Fill;
pub use history::{Epoch, History, Last};
pub use pattern::Pattern;
pub use share::{Segment, Share};
pub use words::{PageId, PageWords, WORDS_PER_PAGE, WordPlan};
