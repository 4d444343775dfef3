//! What both sides of a postcopy share: a guest runs at its destination while pages are missing.
//!
//! | module | contains |
//! | --- | --- |
//! | `order` | the order in which pages are sent. Pure |
//! | `pace` | the rate of pages that were not requested |
//! | `answers` | the destination's messages and their permitted order. Pure |
//! | `advice` | page sizes that both sides must have in common |

mod advice;
pub(crate) mod answers;
pub(crate) mod order;
pub(crate) mod pace;

pub(crate) use advice::page_sizes;
