//! Postcopy: a guest that runs at its destination before its pages are there.
//!
//! An image is served to QEMUs, or to anything that loads as they do (specs/postcopy.md): [`ServedImage`] makes the pages of an
//! image readable at random, and each [`Serving`] sends one destination the devices first, which starts the guest, then the
//! pages that it asks for as it asks, and all others in the background. A connection that breaks can be replaced: the
//! destination says which pages it has.
//!
//! | module | contains |
//! | --- | --- |
//! | `order` | which page goes out next. Pure |
//! | `pace` | how fast pages that nobody asks for may go out |
//! | `answers` | what a destination may say, and when. Pure |
//! | `stream`, `records` | the bytes: everything but the pages, and pages |
//! | `store`, `cache`, `served` | an image's pages at random, in bounded memory, for all who are served |
//! | `link`, `reception` | how a destination is reached, at first and again; destinations that come by themselves |
//! | `shared`, `listener`, `sender`, `serving` | the threads of one destination |
//! | `statistics` | how it goes |

mod advice;
pub(crate) mod answers;
mod cache;
mod link;
mod listener;
pub(crate) mod order;
pub(crate) mod pace;
mod reception;
mod records;
mod sender;
mod served;
mod serving;
mod shared;
mod statistics;
mod store;
mod stream;

pub(crate) use advice::page_sizes;
pub use link::{Accepted, Dial, Link, Purpose};
pub use reception::Reception;
pub use served::{ImageOptions, ServedImage};
pub use serving::{GuestState, ServeFailure, ServeOptions, Serving};
pub use statistics::{ServeStatistics, Stage};
pub use store::Access;
